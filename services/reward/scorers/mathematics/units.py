r"""Units and words behind a number: `5 cm` is 5 with a unit, `5 million` a larger number, `5 or more` no number."""

from __future__ import annotations

import re

_WRAPPER = r"\\(?:text[a-z]*|math(?:rm|it|bf|sf)|mbox|operatorname)"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_WRAPPED = rf"{_WRAPPER}\s*\{{[^{{}}]*\}}{_POWER}"
_DEGREES = rf"\^\s*(?:\\circ(?![a-z])|\{{\s*\\circ\s*\}})(?:\s*(?:[CF]|{_WRAPPER}\s*\{{\s*[CF]\s*\}}))?"
_WORDS = rf"(?<=\s)[A-Za-zµΩ][A-Za-zµΩ./ ]*{_POWER}"
_WRAPPED_UNITS = rf"(?:{_WRAPPED}\s*(?:(?:/|\\cdot(?![a-z]))\s*)?)+"
_IN_PARENTHESES = r"(?<=\d)\s+\([A-Za-z][A-Za-z ]{2,}\)"
_UNIT = re.compile(rf"\s*(?P<unit>{_WRAPPED_UNITS}|(?<=[\d)}}\]i])\s*{_WORDS}|{_IN_PARENTHESES}|{_DEGREES})$")
_DEGREE = re.compile(r"\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})|\\circ(?![a-z])")
_CURRENCY = re.compile(r"\s*\\?[$€£¥₹¢]\s*")
_ENDS_IN_A_VALUE = re.compile(r"[\dA-Za-z)}\]|!]$")
_TEXT = re.compile(rf"{_WRAPPER}\s*\{{([^{{}}]*)\}}")
_UNIT_TEXT = re.compile(r"[A-Za-zµΩ°'’()./·*\- ]*(?:(?<=[A-Za-z])\^?\{?-?[1-4]\}?[A-Za-z/·* ]*)*")
_WORD = re.compile(r"[A-Za-zµΩ]+")
_MOST_WORDS = 6
_LETTERS = frozenset("AFCJKLNTVWghlmsµΩ")
"""Single letters that are units; any other is a variable."""
_SHORT_UNITS = """
am pm cm mm km nm dm kg mg ml mL dL cL ft in yd mi lb oz hr hrs min sec kW MW Hz Pa eV GB MB KB TB mph kph kmh pt qt
gal cc sq cu rad deg th st nd rd kJ kN kV mA mol ha ly au rs Rs
"""
_SHORT = frozenset(_SHORT_UNITS.split())
# What comes behind a number and is no unit: a comparison, a doubt, a verb, another operation.
_OTHER_WORDS = """
this that these those it they we i you and or nor not no never none nothing neither either both but except excluding
including without unless if when where while until since because so then thus hence although though is are was were
be been being isn aren wasn weren do does did don doesn didn has have had can cannot could may might must shall
should will would more less fewer greater larger smaller higher lower least most above below over under beyond
within between up upward upwards down downward downwards onward onwards plus minus times divided than to from at as
with versus vs about approximately approx roughly around almost nearly close maybe perhaps possibly probably likely
unlikely ish maximum minimum max wrong incorrect false invalid impossible rejected excluded extraneous correct
instead rather otherwise unknown undefined infinity infinite inf nan pi sqrt root log ln exp sin cos tan mod modulo
choose factorial squared cubed inverse reciprocal imaginary remainder halves half third thirds quarter quarters
fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth
hundredths thousandth thousandths millionth millionths billionth billionths twice double triple hundred thousand
million billion trillion dozen percent percentage hundreds thousands millions billions trillions dozens lakh crore
also another any others something etc for answer repeating recurring base
"""
_NO_UNITS = frozenset(_OTHER_WORDS.split())
_NOT_FIRST = frozenset({"of", "in", "on", "only"})
_SAME = {
    alias: name
    for name, aliases in {
        "m": "meter metre", "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre",
        "g": "gram gramme", "kg": "kilogram kilo", "mg": "milligram", "l": "liter litre", "ml": "milliliter millilitre",
        "s": "second sec", "min": "minute", "h": "hour hr", "ft": "foot feet", "in": "inch inche", "yd": "yard",
        "mi": "mile", "lb": "pound", "oz": "ounce", "sq": "square", "cu": "cubic", "deg": "degree °", "cent": "¢",
        "dollar": "usd buck", "mi/h": "mph", "km/h": "kph kmph kmh", "rad": "radian",
    }.items()
    for alias in aliases.split()
}  # fmt: skip
_HALF_OF_DAY = re.compile(r"[ap]\.?m\.?", re.IGNORECASE)

_NUMBER = r"(?P<number>\d[\d.]*)"
_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "lakh": 5, "crore": 7}
_MAGNITUDE = re.compile(
    rf"{_NUMBER}[\s-]*(?P<open>{_WRAPPER}\s*\{{\s*)?(?P<word>{'|'.join(_MAGNITUDES)}|dozen)\b", re.IGNORECASE
)
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "fourth": 4, "quarter": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000, "millionth": 10**6, "billionth": 10**9,
}  # fmt: skip
_PART = re.compile(
    rf"(?P<number>\d+)[\s-]*(?P<open>{_WRAPPER}\s*\{{\s*)?(?P<word>{'|'.join(_PARTS)})s?\s*\}}?$", re.IGNORECASE
)
_RAISED = re.compile(
    rf"(?P<base>(?:\d|\)|(?<![A-Za-z])[A-Za-z]))\s*(?:{_WRAPPER}\s*\{{\s*)?(?P<word>squared|cubed|factorial)\b\s*\}}?",
    re.IGNORECASE,
)
_RAISED_TO = {"squared": "^{2}", "cubed": "^{3}", "factorial": "!"}
_PERCENT = re.compile(rf"\s*(?:{_WRAPPER}\s*\{{\s*)?\bper\s?cent\b\s*\}}?", re.IGNORECASE)
_ORDINAL = re.compile(rf"(?<=\d)\s*(?:\^\s*)?\{{?\s*(?:{_WRAPPER}\s*\{{\s*)?(?:st|nd|rd|th)\s*\}}*$")


def with_words_as_numbers(text: str) -> str:
    r"""Writes `5 million` as `5\cdot 10^{6}`, `3 halves` as a fraction, `5 squared` as a power."""
    text = _MAGNITUDE.sub(_magnitude, text)
    text = _PART.sub(lambda match: rf"\frac{{{match['number']}}}{{{_PARTS[match['word'].lower()]}}}", text)
    text = _RAISED.sub(lambda match: match["base"] + _RAISED_TO[match["word"].lower()], text)
    return _ORDINAL.sub("", _PERCENT.sub(r"\\%", text))


def _magnitude(match: re.Match[str]) -> str:
    word = match["word"].lower()
    factor = "12" if word == "dozen" else f"10^{{{_MAGNITUDES[word]}}}"
    return rf"{match['number']}\cdot {factor}{match['open'] or ''}"


def unit(text: str) -> tuple[str, str]:
    """Returns (a normalized text without its unit, the unit); the unit is empty where there is none."""
    match = _UNIT.search(text)
    if match is None:
        return text, ""
    value, said = text[: match.start()].strip(), match["unit"]
    content = _DEGREE.sub(" deg ", _TEXT.sub(r" \1 ", said)).replace(r"\cdot", "·")
    if not value or not _ENDS_IN_A_VALUE.search(value) or not _is_unit(content, is_wrapped="{" in said):
        return text, ""
    return value, _name(content)


def _is_unit(content: str, *, is_wrapped: bool) -> bool:
    if not content.strip():
        return True
    if _CURRENCY.fullmatch(content):
        return True
    plain = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", content)
    words = _WORD.findall(plain)
    if not words or len(words) > _MOST_WORDS or not _UNIT_TEXT.fullmatch(plain):
        return False
    if any(word.lower() in _NO_UNITS for word in words if len(word) > 1) or words[0].lower() in _NOT_FIRST:
        return words == ["in"]
    if any(
        len(word) == 1 and word not in _LETTERS and (word != "a" or number == 0) for number, word in enumerate(words)
    ):
        return bool(_HALF_OF_DAY.fullmatch(plain.strip()))
    return is_wrapped or not any(_is_product(word) for word in words)


def _is_product(word: str) -> bool:
    """True for `ab` and `xyz`, which are no words."""
    is_short = len(word) == 2 and word not in _SHORT and word.lower() not in _SHORT
    return is_short or bool(re.fullmatch("[u-z]{2,}|[a-d]{2,}", word))


def _name(content: str) -> str:
    """Returns one name for the ways to write a unit: `miles`, `mile` and `mi` are the same."""
    name = content.strip().lower()
    if _HALF_OF_DAY.fullmatch(name):
        return name.replace(".", "")
    name = re.sub(r"[{}\s]*\^[{}\s]*(-?\d)[{}\s]*", r"^\1 ", name)
    name = re.sub(r"[^\w^/°¢-]+", " ", name)
    words = [word if len(word) < 3 else word.removesuffix("s") for word in name.split()]
    return " ".join(_SAME.get(word, word) for word in words).replace(" per ", "/")
