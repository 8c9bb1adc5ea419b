"""JSON objects as text: metadata of prompts and samples, on the wire and in the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from headrace.errors import InvalidArgument
from headrace.wire.limits import MAX_JSON_DEPTH


def to_json(value: Mapping[str, Any]) -> str:
    """Compact JSON with sorted keys; empty for an empty mapping, so equal content has equal bytes.

    Raises InvalidArgument for what JSON cannot hold, and for what `from_json` would refuse.
    """
    if not value:
        return ""
    try:
        text = canonical(value)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"metadata cannot be written as JSON: {error}") from error
    _check_depth(text, value)
    return text


def canonical(value: Any) -> str:
    """JSON with sorted keys and no blanks: equal values have equal bytes. Raises as `json.dumps`, also for NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> dict[str, Any]:
    """The mapping behind `to_json`. Raises InvalidArgument unless it is a JSON object that `to_json` can write."""
    if not text:
        return {}
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not JSON: {text[:80]!r}: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"must be a JSON object, got {text[:80]!r}")
    _check_depth(text, value)
    if "\\u" in text:
        _check_encodable(value)
    return value


def object_of_line(line: str | bytes) -> dict[str, Any] | None:
    """Decodes a line of a file that grows: None for one that a kill tore or that is being written, or for no object."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_json(text: str) -> Any:
    """Parses like `json.loads`, but refuses NaN, Infinity, and numbers that a float holds as infinite."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number[:80]} is no JSON number, or too large for one")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        _refuse(text)
    return number


def _check_depth(text: str, value: Mapping[str, Any]) -> None:
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return  # it cannot be deeper than it has brackets
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise InvalidArgument(f"JSON is nested more than {MAX_JSON_DEPTH} deep: {text[:80]!r}")
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list | tuple)]


def _children(parent: Any) -> Any:
    return parent.values() if isinstance(parent, dict) else parent


def _check_encodable(value: Mapping[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"JSON holds half of a surrogate pair, which is no text: {error}") from error
