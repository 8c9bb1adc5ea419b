"""Checks of what a peer sent, each naming the field that is wrong. What it sent is shown in part only."""

from __future__ import annotations

import math
from typing import Any

from headrace.errors import InvalidArgument
from headrace.wire.json_text import read_json
from headrace.wire.limits import (
    MAX_COUNTER,
    MAX_ID_CHARACTERS,
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MAX_NAME_CHARACTERS,
    MAX_PATH_CHARACTERS,
    MAX_TEXT_CHARACTERS,
)

_SHOWN_CHARACTERS = 80
_CONTROLS = frozenset(map(chr, (*range(0x20), *range(0x7F, 0xA0))))


def shown(value: object) -> str:
    """A peer's value as an error message may have it: cut, control characters escaped."""
    text = repr(value[: _SHOWN_CHARACTERS + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def require_id(value: str, field: str) -> str:
    """The id: 1 to 512 characters, none of them a control character. `/` is allowed: ids of groups hold it."""
    return _printable(value, field, MAX_ID_CHARACTERS)


def require_name(value: str, field: str) -> str:
    """The name: 1 to 128 characters, none of them a control character."""
    return _printable(value, field, MAX_NAME_CHARACTERS)


def require_path(value: str, field: str) -> str:
    """The path: 1 to 4,096 characters, none of them a control character."""
    return _printable(value, field, MAX_PATH_CHARACTERS)


def optional_name(value: str, field: str) -> str | None:
    """The name; None where it is empty."""
    return require_name(value, field) if value else None


def cut_text(text: str) -> str:
    """A message for people, cut to 2,048 characters."""
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[: MAX_TEXT_CHARACTERS - 1]}…"


def one_line(text: str, most: int = 240) -> str:
    """A peer's message as a part of a line on a terminal: printable characters, blanks for all others, cut."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * most]).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def require_some(count: int, field: str) -> None:
    """Raises InvalidArgument when there is none."""
    if count < 1:
        raise InvalidArgument(f"{field} is empty, must have at least one", field=field)


def require_at_most(count: int, most: int, field: str) -> None:
    """Raises InvalidArgument when a call brings more entries than it may."""
    if count > most:
        raise InvalidArgument(
            f"{field} has {count} entries, a call may have {most} at most: make several calls of it",
            field=field,
            reason="BATCH_TOO_LARGE",
            limit=str(most),
        )


def require_bytes(num_bytes: int, most: int, field: str) -> None:
    """Raises InvalidArgument for what is larger than it may be."""
    if num_bytes > most:
        raise InvalidArgument(
            f"{field} has {num_bytes} bytes, may have {most}", field=field, reason="TOO_LARGE", limit=str(most)
        )


def require_between(value: int, least: int, most: int, field: str) -> int:
    """The number. Raises InvalidArgument outside of [least, most]."""
    if not least <= value <= most:
        raise InvalidArgument(f"{field} is {value}, must be {least} to {most}", field=field)
    return value


def require_counter(value: int, field: str) -> int:
    """A step, an epoch, a policy version, a position, a number of bytes: 0 to 2^53."""
    return require_between(value, 0, MAX_COUNTER, field)


def require_finite(value: float, field: str, *, least: float = 0.0, most: float = math.inf) -> float:
    """The number. Raises InvalidArgument for what is not finite, or outside of [least, most]."""
    if not (math.isfinite(value) and least <= value <= most):
        bounds = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        raise InvalidArgument(f"{field} is {value:g}, must be {bounds}", field=field)
    return value


def require_json_object(text: str, field: str) -> dict[str, Any]:
    """The JSON object; {} where the text is empty."""
    value = _json(text, field) if text else {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field} must be a JSON object, is {shown(text)}", field=field)
    return value


def require_json_array(text: str, field: str) -> list[Any]:
    """The JSON array; [] where the text is empty."""
    value = _json(text, field) if text else []
    if not isinstance(value, list):
        raise InvalidArgument(f"{field} must be a JSON array, is {shown(text)}", field=field)
    return value


def _printable(value: str, field: str, most: int) -> str:
    if not 0 < len(value) <= most:
        raise InvalidArgument(f"{field} has {len(value)} characters, must have 1 to {most}", field=field)
    if not value.isprintable() and not _CONTROLS.isdisjoint(value):
        raise InvalidArgument(f"{field} {shown(value)} holds a control character", field=field)
    return value


def _json(text: str, field: str) -> Any:
    require_bytes(len(text.encode("utf-8", "surrogatepass")), MAX_JSON_BYTES, field)
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field} is not JSON: {shown(text)}: {error}", field=field) from error
    if _depth(value) > MAX_JSON_DEPTH:
        raise InvalidArgument(f"{field} is nested deeper than {MAX_JSON_DEPTH} levels", field=field)
    return value


def _depth(value: Any) -> int:
    """Levels of objects and arrays, counted without recursion; stops behind the limit."""
    level, depth = [value], 0
    while depth <= MAX_JSON_DEPTH:
        level = [v for v in level if isinstance(v, dict | list)]
        if not level:
            break
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth
