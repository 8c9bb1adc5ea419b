"""Brings several solutions, as people write them, into one text: `x = 2 or x = 3`, `x = 2, y = 3`, `x < 1 or x > 3`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPEN, _CLOSE = "([{", ")]}"
_WORD_AND = r"\\(?:text[a-z]*|mathrm|mbox)\s*\{\s*and\s*\}|\\(?:land|wedge)(?![a-z])|(?<![\\a-zA-Z])and(?![a-zA-Z])"
_WORD_OR = r"\\(?:text[a-z]*|mathrm|mbox)\s*\{\s*or\s*\}|\\(?:lor|vee)(?![a-z])|(?<![\\a-zA-Z])or(?![a-zA-Z])"
_OR = re.compile(_WORD_OR)
_AND = re.compile(_WORD_AND)
_BETWEEN = re.compile(rf"(?:[,;]\s*)?(?:{_WORD_OR}|{_WORD_AND})|[,;]")
_ASSIGNED = re.compile(r"(?P<name>[a-zA-Z])(?:\s*_\s*\{?\s*\w\s*\}?)?\s*=\s*(?P<value>[^=<>]+)")
_LESS, _NOT_MORE = r"<|\\lt(?![a-z])", r"\\leq?(?:slant)?(?![a-z])"
_MORE, _NOT_LESS = r">|\\gt(?![a-z])", r"\\geq?(?:slant)?(?![a-z])"
_RELATION = rf"(?P<sign>{_NOT_MORE}|{_NOT_LESS}|{_LESS}|{_MORE})"
_BOUNDED = re.compile(rf"(?P<name>[a-zA-Z])\s*{_RELATION}(?P<bound>[^=<>]+)")
_WITHIN = re.compile(
    rf"(?P<low>[^=<>]+?)(?P<left>{_NOT_MORE}|{_LESS})\s*(?P<name>[a-zA-Z])\s*(?P<right>{_NOT_MORE}|{_LESS})(?P<high>[^=<>]+)"
)
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-z])")
_FALLING = re.compile(rf"([^=<>]+?)({_NOT_LESS}|{_MORE})\s*([a-zA-Z])\s*({_NOT_LESS}|{_MORE})([^=<>]+)")
_POINT_WITH_A_NAME = re.compile(r"[A-Z]\s*(\([^()]*,[^()]*\))")


@dataclass(frozen=True, slots=True)
class Solutions:
    """`text` is for math-verify. `names` are those of a point's coordinates, in order; empty otherwise."""

    text: str
    names: str = ""


def solutions(text: str) -> Solutions:
    """Returns the list, point or union that a normalized text means, or the text itself when it means none of them."""
    if point := _POINT_WITH_A_NAME.fullmatch(text):
        return Solutions(point[1])
    text = _with_both_signs(text)
    if falling := _FALLING.fullmatch(text):
        high, left, name, right, low = falling.groups()
        return Solutions(f"{low.strip()}{_risen(right)}{name}{_risen(left)}{high.strip()}")
    parts = [part.strip() for part in _parts(text)]
    if len(parts) < 2:
        return Solutions(text)
    assigned = [match for part in parts if (match := _ASSIGNED.fullmatch(part))]
    if len(assigned) == len(parts):
        return _of_assigned([(match["name"], match["value"].strip()) for match in assigned])
    intervals = [interval for part in parts if (interval := _interval(part))]
    if len(intervals) == len(parts) and len({name for name, _ in intervals}) == 1:
        if len(_OR.findall(text)) == len(parts) - 1:
            return Solutions(r"\cup ".join(interval for _, interval in intervals))
        if len(_AND.findall(text)) == len(parts) - 1 == 1:
            return Solutions(_common(*(interval for _, interval in intervals)) or text)
    return Solutions(text)


def _with_both_signs(text: str) -> str:
    r"""Writes a `\pm` inside of brackets as two solutions; outside of them, math-verify does so."""
    signs = list(_PLUS_MINUS.finditer(text))
    if not signs or not any(_depth(text[: sign.start()]) for sign in signs):
        return text
    upper = _PLUS_MINUS.sub(lambda sign: "+" if sign[1] == "pm" else "-", text)
    lower = _PLUS_MINUS.sub(lambda sign: "-" if sign[1] == "pm" else "+", text)
    name, equals, value = lower.partition("=")
    return f"{upper}, {value.strip() if equals and name.strip().isalpha() else lower}"


def _depth(text: str) -> int:
    return sum(text.count(mark) for mark in _OPEN) - sum(text.count(mark) for mark in _CLOSE)


def _risen(sign: str) -> str:
    return r"\le " if _is_closed(sign) else "<"


def _of_assigned(assigned: list[tuple[str, str]]) -> Solutions:
    """One name gives the list of its values; several give a point, with its coordinates in alphabetical order."""
    names = sorted(name for name, _ in assigned)
    values = ", ".join(value for _, value in (assigned if len(set(names)) == 1 else sorted(assigned)))
    if len(set(names)) == 1:
        return Solutions(values)
    return Solutions(f"({values})", "".join(names))


def _interval(relation: str) -> tuple[str, str] | None:
    """Returns the name that a relation bounds, and its interval."""
    if match := _WITHIN.fullmatch(relation):
        left, right = ("[" if _is_closed(match["left"]) else "("), ("]" if _is_closed(match["right"]) else ")")
        return match["name"], f"{left}{match['low'].strip()},{match['high'].strip()}{right}"
    match = _BOUNDED.fullmatch(relation)
    if match is None:
        return None
    bound, is_closed = match["bound"].strip(), _is_closed(match["sign"])
    if re.fullmatch(f"{_LESS}|{_NOT_MORE}", match["sign"]):
        return match["name"], rf"(-\infty,{bound}{']' if is_closed else ')'}"
    return match["name"], rf"{'[' if is_closed else '('}{bound},\infty)"


def _common(one: str, other: str) -> str | None:
    """Intersects an interval without an upper end with one without a lower end; None for others."""
    for low, high in ((one, other), (other, one)):
        if low.endswith(r",\infty)") and high.startswith(r"(-\infty,"):
            return low.removesuffix(r"\infty)") + high.removeprefix(r"(-\infty,")
    return None


def _is_closed(sign: str) -> bool:
    return re.fullmatch(f"{_NOT_MORE}|{_NOT_LESS}", sign) is not None


def _parts(text: str) -> list[str]:
    """Splits at commas, `and` and `or` outside of brackets."""
    parts, start = [], 0
    for match in _BETWEEN.finditer(text):
        before = text[: match.start()]
        if sum(before.count(mark) for mark in _OPEN) == sum(before.count(mark) for mark in _CLOSE):
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]
