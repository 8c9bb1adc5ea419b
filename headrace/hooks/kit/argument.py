"""Values of tool arguments that a format writes without JSON's quotes, as GLM does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "array": list,
    "null": type(None),
}
_MOST_REFERENCES = 8


def argument_of(text: str, parameters: Mapping[str, Any], name: str) -> Any:
    """Returns the value that `text` is for the parameter `name` of a tool with the JSON schema `parameters`.

    A parameter of text gets the text. Without a schema a text is a value only where JSON would write the value so:
    `0042`, `1.10` and `2031-05-17` stay text.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    kinds = set(_kinds(schema, parameters, _MOST_REFERENCES)) if isinstance(schema, Mapping) else set()
    value = _json(text.strip())
    if isinstance(value, str):
        return text if value == text.strip() else value  # a text in JSON's quotes
    if not kinds:
        return text if value is _NONE or not _is_written_so(value, text.strip()) else value
    for kind in ("null", "boolean", "integer", "number", "object", "array"):
        if kind in kinds and _is_of(value, kind) and ("string" not in kinds or _is_written_so(value, text.strip())):
            return value
    if "string" not in kinds and "boolean" in kinds and text.strip() in ("True", "False"):
        return text.strip() == "True"
    if "string" not in kinds and "integer" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    return text


_NONE = object()


def json_at(text: str, position: int) -> tuple[Any, int]:
    """Returns the JSON value that begins there, and its end; (None, -1) where none is well-formed.

    JSON has no NaN and no infinity: they stay the text that the policy wrote, as in the JSON of protocol buffers.
    """
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None, -1


def _number(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


_DECODER = json.JSONDecoder(strict=False, parse_constant=str, parse_float=_number)


def _json(text: str) -> Any:
    """The value of the whole text, or _NONE."""
    value, end = json_at(text, 0)
    return value if end == len(text) else _NONE


def _is_written_so(value: Any, text: str) -> bool:
    """False for numbers that lose digits or zeros."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value) == text
    return value is not _NONE


def _is_of(value: Any, kind: str) -> bool:
    if value is _NONE or (isinstance(value, bool) and kind != "boolean"):
        return False
    return isinstance(value, _KINDS[kind])


def _kinds(schema: Mapping[str, Any], root: Mapping[str, Any], most: int) -> Iterator[str]:
    """Yields JSON's names of the types that the schema allows; none where it allows all."""
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else [each for each in kind or () if isinstance(each, str)]
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    for value in [*values, *([schema["const"]] if "const" in schema else [])]:
        yield next((name for name, of in _KINDS.items() if isinstance(value, of)), "string")
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            if isinstance(part, Mapping) and most:
                yield from _kinds(part, root, most - 1)
    if isinstance(reference := schema.get("$ref"), str) and most:
        for folder in ("$defs", "definitions"):
            defined = root.get(folder)
            part = defined.get(reference.rpartition("/")[2]) if isinstance(defined, Mapping) else None
            if isinstance(part, Mapping):
                yield from _kinds(part, root, most - 1)
