"""Checks that hold for every value of a job: it can be written to a file, read back, and computed with."""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path
from typing import Any

from headrace.wire.limits import MAX_COUNTER, MAX_JSON_DEPTH, MAX_PATH_CHARACTERS

_LARGEST = 1e30
_SMALLEST = 1e-30
_MAX_ENTRIES = 4096
_MAX_FOLDER_NAME_BYTES = 255
_BREAKS = "\n\t\r"


def sound(value: Any, depth: int = 0) -> Any:
    """Returns the value. Raises ValueError for one that would not reach the run unchanged.

    Numbers are finite, and float32 and JSON can hold them; text has no control characters but line breaks and tabs.
    """
    match value:
        case float():
            _number(value)
        case int():
            if abs(value) > MAX_COUNTER:
                raise ValueError(f"should be at most {MAX_COUNTER} in size")
        case str():
            _text(value)
        case Path():
            _path(value)
        case dict() | list() | tuple():
            if depth > MAX_JSON_DEPTH or len(value) > _MAX_ENTRIES:
                raise ValueError(f"should have at most {_MAX_ENTRIES} entries, and {MAX_JSON_DEPTH} levels")
            for inner in (*value, *value.values()) if isinstance(value, dict) else value:
                sound(inner, depth + 1)
    return value


def plain(value: Any) -> Any:
    """Returns the value of an untyped argument. Raises ValueError for one that JSON cannot hold."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            if inner is None:
                raise ValueError("should have no null values")
            plain(inner)
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"should be text, a number, true, false or a list, not {type(value).__name__}")
    return sound(value)


def _number(value: float) -> None:
    if not math.isfinite(value):
        raise ValueError("should be a finite number")
    if value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise ValueError(f"should be 0, or between {_SMALLEST:g} and {_LARGEST:g} in size: float32 holds no other")


def _text(value: str) -> None:
    if len(value) > MAX_PATH_CHARACTERS:
        raise ValueError(f"should have at most {MAX_PATH_CHARACTERS} characters, not {len(value)}")
    if any(unicodedata.category(each) in ("Cc", "Cs") for each in value if each not in _BREAKS):
        raise ValueError("should have no control characters and be valid UTF-8")


def _path(value: Path) -> None:
    _text(str(value))
    if any(each in str(value) for each in _BREAKS):
        raise ValueError("should be a path without line breaks")
    if any(len(part.encode()) > _MAX_FOLDER_NAME_BYTES for part in value.parts):
        raise ValueError(f"should be a path whose names have at most {_MAX_FOLDER_NAME_BYTES} bytes")
