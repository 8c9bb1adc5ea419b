"""Finds expressions whose value is too large to write down: a library that evaluates them would not end."""

from __future__ import annotations

import re

_MOST_CHARACTERS = 2000
_MOST_DEPTH = 30
_MOST_EXPONENT = 10_000
_OPEN = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_POWER = r"\s*(?:\^|\*\*)\s*"
_TOWER = re.compile(rf"\d[)}}\s]*{_POWER}[{{(]*\s*(\d+)[)}}\s]*{_POWER}[{{(]*\s*(\d+)")
_EXPONENT = re.compile(rf"{_POWER}[{{(]*\s*[-+]?\s*(\d+)")
_FACTORIAL = re.compile(r"(\d+)\s*!|[({]([^()a-zA-Z]*[\^!*\d][^()a-zA-Z]*)[)}]+\s*!")


def is_too_large(text: str) -> bool:
    """True for a normalized text that is long, deep, or has a power or factorial with too many digits."""
    if len(text) > _MOST_CHARACTERS or _depth(text) > _MOST_DEPTH:
        return True
    if any(_number(match[1]) > _MOST_EXPONENT for match in _EXPONENT.finditer(text)):
        return True
    if any(_is_large_factorial(match) for match in _FACTORIAL.finditer(text)):
        return True
    return any(_number(match[1]) ** min(_number(match[2]), 64) > _MOST_EXPONENT for match in _TOWER.finditer(text))


def _is_large_factorial(match: re.Match[str]) -> bool:
    operand = match[1] or match[2]
    return _number(operand) > _MOST_EXPONENT if operand.isdecimal() else bool(re.search(r"\d{5}|[\^!*]", operand))


def _depth(text: str) -> int:
    depth = most = 0
    for character in text:
        depth += _OPEN.get(character, 0)
        most = max(most, depth)
    return most


def _number(digits: str) -> int:
    return int(digits[:9])
