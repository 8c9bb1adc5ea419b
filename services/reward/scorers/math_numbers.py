"""Plain numbers, compared exactly: integers, decimals, fractions, mixed numbers, powers of ten, other bases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_DIGITS = r"(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})"
_DECIMAL = re.compile(
    rf"(?P<value>{_DIGITS})(?:[eE](?P<e>[+-]?\d{{1,3}})|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*"
    r"(?:\{\s*(?P<brace>[+-]?\d{1,3})\s*\}|(?P<power>[+-]?\d{1,3})))?"
)
_FRACTION = re.compile(
    r"(?P<whole>\d{1,400}(?=\s|\\))?\s*"
    r"(?:(?P<a>\d{1,400})\s*/\s*(?P<b>\d{1,400})"
    r"|\\frac\s*(?:\{\s*(?P<c>[+-]?\d{1,400})\s*\}|(?P<d>\d))\s*(?:\{\s*(?P<f>\d{1,400})\s*\}|(?P<g>\d)))"
)
_REPEATING = re.compile(
    r"(?P<whole>\d{0,400})\.(?P<fixed>\d{0,400})\\(?:overline|bar)\s*(?:\{(?P<again>\d{1,400})\}|(?P<digit>\d))"
)
_BASED = re.compile(r"(?P<digits>[0-9A-Za-z]{1,400})\s*_\s*\{?\s*(?P<base>\d{1,2})\s*\}?")
# A decimal with at least this number of digits stands for the number that it is cut off or rounded from.
_ENOUGH_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Number:
    """`last_digit` is the worth of a decimal's last digit where the decimal may be rounded; else None.

    `names_base`: it is written with its base, as `101_2`.
    """

    value: Fraction
    last_digit: Fraction | None = None
    names_base: bool = False


def number(text: str) -> Number | None:
    """Returns None unless the normalized text is a number and nothing else."""
    sign, rest = _signed(text)
    if match := _FRACTION.fullmatch(rest):
        above, below = int(match["a"] or match["c"] or match["d"]), int(match["b"] or match["f"] or match["g"])
        whole = int(match["whole"] or 0)
        return Number(sign * (whole + Fraction(above, below))) if below else None
    if match := _REPEATING.fullmatch(rest):
        return _repeating(sign, match["whole"], match["fixed"], match["again"] or match["digit"])
    if match := _DECIMAL.fullmatch(rest):
        return _decimal(sign, match)
    if (match := _BASED.fullmatch(rest)) and 2 <= int(match["base"]) <= 36:
        return _in_base(sign, match["digits"], int(match["base"]))
    return None


def is_same(one: Number, other: Number) -> bool:
    """True when they are equal, or one is the other cut off or rounded to six digits or more."""
    if one.names_base != other.names_base:
        return False
    return one.value == other.value or _stands_for(one, other) or _stands_for(other, one)


def _signed(text: str) -> tuple[int, str]:
    text = text.strip()
    return (-1 if text.startswith("-") else 1), text[text[:1] in ("-", "+") :].strip()


def _in_base(sign: int, digits: str, base: int) -> Number | None:
    try:
        return Number(Fraction(sign * int(digits, base)), names_base=True)
    except ValueError:  # a_2 is no number
        return None


def _repeating(sign: int, whole: str, fixed: str, again: str) -> Number:
    tail = Fraction(int(again), 10 ** len(again) - 1)
    return Number(sign * (int(whole + fixed or "0") + tail) / 10 ** len(fixed))


def _decimal(sign: int, match: re.Match[str]) -> Number:
    digits = match["value"]
    power = int(match["e"] or match["brace"] or match["power"] or 0)
    value = sign * Fraction(digits if digits[-1] != "." else digits[:-1]) * Fraction(10) ** power
    _, _, decimals = digits.partition(".")
    significant = len(digits.replace(".", "").lstrip("0"))
    if not decimals or significant < _ENOUGH_DIGITS:
        return Number(value)
    return Number(value, Fraction(10) ** (power - len(decimals)))


def _stands_for(short: Number, long: Number) -> bool:
    """True when the longer number rounds or cuts to the shorter; equally long decimals must be equal."""
    if short.last_digit is None or (long.value / short.last_digit).denominator == 1:
        return False
    difference = abs(long.value) - abs(short.value)
    same_sign = short.value * long.value > 0
    return same_sign and (0 < difference < short.last_digit or 2 * abs(difference) <= short.last_digit)
