"""Values of a tested program as JSON, with a name for each type that JSON lacks; and how results are compared."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any

from headrace.errors import InvalidArgument

ENCODER = """
def _plain(value):
    if value is None or isinstance(value, (bool, str)):
        return value if type(value) in (bool, str, type(None)) else str(value)
    if isinstance(value, int):
        return {"int": str(int(value))}
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": repr(complex(value))}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [_plain(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [_plain(each) for each in value]
"""
"""Runs beside the tested program, and so without headrace."""


def decoded(text: str) -> Any:
    """Reads what `_plain` has written. Raises ValueError, RecursionError or TypeError for anything else."""
    return _value(json.loads(text))


def _value(plain: Any) -> Any:
    match plain:
        case None | bool() | str():
            return plain
        case list():
            return [_value(each) for each in plain]
        case {"int": str(digits)}:
            return int(digits)
        case {"float": str(digits)}:
            return float(digits)
        case {"complex": str(digits)}:
            return complex(digits)
        case {"bytes": str(digits)}:
            return bytes.fromhex(digits)
        case {"tuple": list(items)}:
            return tuple(_value(each) for each in items)
        case {"set": list(items)}:
            return {_value(each) for each in items}
        case {"dict": list(items)}:
            return {_value(key): _value(each) for key, each in items}
    raise ValueError(f"{plain!r:.80} is no value")


def encoded(value: Any) -> Any:
    """The same for arguments, which are values of JSON or of Python's literals."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return {"int": str(value)}
        case float():
            return {"float": repr(value)}
        case list():
            return [encoded(each) for each in value]
        case dict():
            return {"dict": [[encoded(key), encoded(each)] for key, each in value.items()]}
    raise InvalidArgument(f"scorer code: an argument is a {type(value).__name__}")


def same_json(result: Any, expected: Any) -> bool:
    """Compares as data sets in JSON do: tuples are lists, keys are text, and one result may stand in a list alone."""
    found = _listed(result)
    wanted = _listed(expected)
    return bool(found == wanted or (isinstance(wanted, list) and len(wanted) == 1 and found == wanted[0]))


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _listed(each) for key, each in value.items()}
    return value


def same_output(written: str, expected: str) -> bool:
    """Compares line by line without surrounding blanks; words that are numbers are compared as numbers."""
    found, wanted = _rows(written), _rows(expected)
    return len(found) == len(wanted) and all(map(_same_row, found, wanted))


def _rows(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_row(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    left, right = found.split(), wanted.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    try:
        return Decimal(found) == Decimal(wanted)
    except InvalidOperation:
        return False
