"""`--json` of a command: one JSON value on stdout, for scripts. What a person reads meanwhile goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import click
from google.protobuf.message import Message

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: Any) -> None:
    """Prints dataclasses, messages, paths and what JSON has itself."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def teller(as_json: bool) -> Callable[[str], None]:
    """Prints a line for a person: to stdout, or to stderr where stdout is JSON."""
    return lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Message):
        return _fields(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _fields(message: Message) -> dict[str, Any]:
    """All fields under the names of the protos; null for an absent one. Numbers stay numbers, also those of 64 bits."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if isinstance(value, Mapping):
        return dict(value)
    names = field.enum_type.values_by_number if field.enum_type else None
    if field.is_repeated:
        return [names[each].name if names else each for each in value]
    return names[value].name if names else value
