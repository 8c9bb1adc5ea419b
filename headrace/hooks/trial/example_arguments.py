"""Arguments that fit a tool's JSON schema, for an engine that stands in for a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MAX_DEPTH = 8
_ABSENT = object()
_FORMATS = {
    "date": "2024-01-02",
    "date-time": "2024-01-02T03:04:05Z",
    "time": "03:04:05Z",
    "duration": "PT1S",
    "email": "someone@example.org",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000007",
    "ipv4": "127.0.0.1",
}


def example_of(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """A small value that the schema allows: required properties alone. A `pattern` of text is not followed."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return {} if depth == 0 else None
    if isinstance(reference := schema.get("$ref"), str):
        return example_of(_referred(root, reference), root, depth + 1)
    if named := [schema[key] for key in ("const", "default") if schema.get(key) is not None]:
        return named[0]
    for key in ("enum", "examples"):
        if isinstance(values := schema.get(key), Sequence) and values:
            return values[0]
    if (combined := _of_parts(schema, root, depth)) is not _ABSENT:
        return combined
    return _of_type(_type(schema, depth), schema, root, depth)


def _of_parts(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), Sequence) and options:
            first = next((each for each in options if not _is_null(each)), options[0])
            return example_of(first, root, depth + 1)
    parts = schema.get("allOf")
    if not isinstance(parts, Sequence) or not parts:
        return _ABSENT
    values = [example_of(part, root, depth + 1) for part in parts]
    if not all(isinstance(value, dict) for value in values):
        return values[0]
    return {key: item for value in values for key, item in value.items()} | _object(schema, root, depth)


def _of_type(kind: str, schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    match kind:
        case "object":
            return _object(schema, root, depth)
        case "array":
            count = schema.get("minItems") or 1
            return [example_of(schema.get("items", {}), root, depth + 1) for _ in range(min(count, 8))]
        case "integer" | "number":
            return _number(schema, is_integer=kind == "integer")
        case "boolean":
            return True
        case "null":
            return None
    text = _FORMATS.get(str(schema.get("format")), "7")
    return text.ljust(int(schema.get("minLength") or 0), "7")


def _object(schema: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    names = required if isinstance(required, Sequence) else ()
    return {name: example_of(known.get(name, {"type": "string"}), root, depth + 1) for name in names}


def _number(schema: Mapping[str, Any], *, is_integer: bool) -> int | float:
    step = schema.get("multipleOf") or 1
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    value = 7.0
    if least is not None and value <= least:
        value = least if "minimum" in schema else least + step
    if most is not None and value >= most:
        value = most if "maximum" in schema else max(most - step, (most + (least or most - 2)) / 2)
    if value % step:
        value += step - value % step
    return int(value) if is_integer or value == int(value) else value


def _type(schema: Mapping[str, Any], depth: int) -> str:
    kind = schema.get("type")
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        kind = next((each for each in kind if each != "null"), "null")
    if isinstance(kind, str):
        return kind
    if "properties" in schema or depth == 0:
        return "object"
    return "array" if "items" in schema else "string"


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _referred(root: Any, reference: str) -> Any:
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
    return found
