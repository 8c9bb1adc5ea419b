"""Values of a tested program as JSON, with a name for each type that JSON lacks; and how results are compared.

Results are data of a program that may be hostile: no number of it becomes a key of a set or a dict here, because
numbers whose hashes collide cost quadratic time.

Floating-point numbers are compared as APPS and TACO do: they may differ by 1e-8 + 1e-5 × the expected one. Whole
numbers are compared exactly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from fractions import Fraction
from typing import Any

from headrace.errors import InvalidArgument

ENCODER = """
def _plain(value):
    if value is None or isinstance(value, (bool, str)):
        return value if type(value) in (bool, str, type(None)) else str(value)
    if isinstance(value, int):
        return {"int": hex(int(value))}
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
    if (type(value).__module__, type(value).__name__) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return {type(value).__name__: str(value)}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [_plain(each) for each in value]

def _given(plain):
    if isinstance(plain, list):
        return [_given(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, held),) = plain.items()
    if kind == "tuple":
        return tuple(_given(each) for each in held)
    if kind == "set":
        return {_hashable(_given(each)) for each in held}
    if kind == "dict":
        return {_hashable(_given(key)): _given(each) for key, each in held}
    if kind == "int":
        return int(held, 16)
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind in ("Decimal", "Fraction"):
        import decimal, fractions
        return getattr(decimal if kind == "Decimal" else fractions, kind)(held)
    return {"float": float, "complex": complex}[kind](held)

def _hashable(value):
    if isinstance(value, tuple):
        return tuple(_hashable(each) for each in value)
    return frozenset(value) if isinstance(value, set) else value
"""
"""Runs in sandboxes, and so without headrace."""

_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
_BESIDE_WHOLE = Fraction(1, 10**6)
"""What a floating-point number may differ by from a whole one."""
_INTEGER = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,6})?")
_QUOTIENT = re.compile(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?")
_BRACKETS = "[](){},;"
_MOST_EXPONENT = 400


@dataclass(frozen=True, slots=True)
class Bag:
    """A set's values, some perhaps twice."""

    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict's items, some keys perhaps twice."""

    items: Sequence[tuple[Any, Any]]


def decoded(text: str) -> Any:
    """Reads what `_plain` has written. Raises ValueError, RecursionError or TypeError for anything else."""
    return value_of(json.loads(text))


def value_of(plain: Any) -> Any:
    """The same for JSON that has been read. A set is a Bag, a dict is Pairs."""
    match plain:
        case None | bool() | str():
            return plain
        case list():
            return [value_of(each) for each in plain]
        case {"tuple": list(items)}:
            return tuple(value_of(each) for each in items)
        case {"set": list(items)}:
            return Bag([value_of(each) for each in items])
        case {"dict": list(items)}:
            return Pairs([(value_of(key), value_of(each)) for key, each in items])
        case dict() if len(plain) == 1:
            ((kind, text),) = plain.items()
            if isinstance(text, str):
                return _scalar(kind, text)
    raise ValueError(f"{plain!r:.80} is no value")


def _scalar(kind: str, text: str) -> Any:
    match kind:
        case "int":
            return int(text, 16)
        case "float":
            return float(text)
        case "complex":
            return complex(text)
        case "bytes":
            return bytes.fromhex(text)
        case "Decimal":
            number = Decimal(text)
            if number.is_finite() and abs(number.adjusted()) > _MOST_EXPONENT:
                raise ValueError(f"{text:.40} is too large or too small a number")
            return int(number) if number.is_finite() and number == number.to_integral_value() else float(number)
        case "Fraction" if _QUOTIENT.fullmatch(text):
            quotient = Fraction(text)
            return int(quotient) if quotient.denominator == 1 else float(quotient)
    raise ValueError(f"{kind[:40]} is no type of a value")


def encoded(value: Any) -> Any:
    """The same for arguments, which are values of JSON or of Python's literals."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return {"int": hex(value)}
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
    if same_value(found, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and same_value(found, expected[0])


def _listed(value: Any) -> Any:
    match value:
        case list() | tuple():
            return [_listed(each) for each in value]
        case Pairs(items):
            return Pairs([(str(key) if isinstance(key, int | float) else key, _listed(each)) for key, each in items])
        case Bag(values):
            return Bag([_listed(each) for each in values])
    return value


def same_value(found: Any, expected: Any) -> bool:
    """Compares a decoded value with a value of Python, as `==` does but for floating-point numbers."""
    match expected:
        case bool() | int() | float() | complex():
            return isinstance(found, int | float | complex) and same_number(found, expected)
        case list() | tuple():
            return (
                isinstance(found, list if isinstance(expected, list) else tuple)
                and len(found) == len(expected)
                and all(map(same_value, found, expected))
            )
        case set() | frozenset():
            return isinstance(found, Bag) and _same_set(found.values, list(expected))
        case dict():
            if not isinstance(found, Pairs):
                return False
            ours, theirs = (
                {_key(key): value for key, value in items} for items in (found.items, list(expected.items()))
            )
            return ours.keys() == theirs.keys() and all(same_value(ours[key], theirs[key]) for key in ours)
    return type(found) is type(expected) and bool(found == expected)


def _same_set(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    if {_key(value) for value in found} == {_key(value) for value in expected}:
        return True
    if not all(isinstance(value, int | float) for value in (*found, *expected)) or len(found) != len(expected):
        return False
    return all(map(same_number, sorted(found), sorted(expected)))


def _key(value: Any) -> str:
    """A text that two values share when they are equal: the hashes of texts cannot be chosen."""
    match value:
        case bool() | int():
            return hex(value)
        case float():
            return hex(int(value)) if value.is_integer() else repr(value)
        case list() | tuple():
            return f"{type(value).__name__}({','.join(map(_key, value))})"
        case Bag(values):
            return f"set({','.join(sorted({_key(each) for each in values}))})"
        case set() | frozenset():
            return _key(Bag(list(value)))
        case Pairs(items):
            return f"dict({','.join(sorted(f'{_key(key)}:{_key(each)}' for key, each in items))})"
    return f"{type(value).__name__} {value!r}"


def same_number(found: complex, expected: complex) -> bool:
    """Compares two whole numbers exactly, others with a tolerance. A number that is none equals another such."""
    if found == expected:
        return True
    if isinstance(found, complex) or isinstance(expected, complex):
        found, expected = complex(found), complex(expected)
        return same_number(found.real, expected.real) and same_number(found.imag, expected.imag)
    if isinstance(found, int) and isinstance(expected, int):
        return False
    if not (_is_finite(found) and _is_finite(expected)):
        return found != found and expected != expected
    if isinstance(found, int) or isinstance(expected, int):
        # A whole number that no float has is compared with the float that is nearest to it.
        if isinstance(expected, float) and abs(expected) >= 1 << 53:
            return abs(found) < 1 << 1023 and float(found) == expected
        return abs(Fraction(found) - Fraction(expected)) <= _BESIDE_WHOLE
    return abs(found - expected) <= _ABSOLUTE + _RELATIVE * abs(expected)


def _is_finite(number: float) -> bool:
    return isinstance(number, int) or math.isfinite(number)


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
    ours, theirs = found.strip(_BRACKETS), wanted.strip(_BRACKETS)
    if not ours or not theirs or found.split(ours, 1) != wanted.split(theirs, 1):
        return False
    if not (_REAL.fullmatch(ours) and _REAL.fullmatch(theirs)):
        return False
    try:
        if Decimal(ours) == Decimal(theirs):
            return True
        whole = [_INTEGER.fullmatch(word) is not None for word in (ours, theirs)]
        if not any(whole):
            return same_number(float(ours), float(theirs))
        return not all(whole) and abs(Decimal(ours) - Decimal(theirs)) <= Decimal("1e-6")
    except DecimalException:
        return False
