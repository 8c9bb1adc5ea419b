"""Brings mathematics, as people and models write it, into one form for comparison."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.reward.scorers.answers import boxed, tagged

_UNICODE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "°": r"^\circ ",
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f", " "),
    }
)
_SPACES = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad\b)|~|\s+")
_SPLIT_THOUSANDS = re.compile(r"(?<=\d),\\!\s*(?=\d{3})")
_ROW_GAP = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]")
_COLON = re.compile(r"(?<=\d)\s*(?:\{\s*:\s*\}|:)\s*(?=\d)")
_RATIO = re.compile(r"^(\d+) to (\d+)$")
_BASE = re.compile(r"_\s*\{?\s*\\text\s*\{\s*(\w+)\s*\}\s*\}?")
_BASES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NOTHING = re.compile(r"\\(?:!|displaystyle\b|left(?![a-z])|right(?![a-z])|[bB]igg?[lr]?(?![a-z]))|\{\s*\}")
_FRACTION = re.compile(r"\\[dtc]frac")
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|[a-z]|(?=\())|(?<![\\a-z])sqrt\s*(?=\()")
_NAMES = re.compile(r"(?<![\\a-zA-Z])(?:pi|sin|cos|tan|ln|log)(?![a-zA-Z])")
_PARENTHESIS = re.compile(r"\\sqrt\(([^()]*)\)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?: \d{3})+|(?:_\d{3})+|(?:\{,\}\d{3})+)(?![\d_])")
_COMMAS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_CURRENCIES = "€£¥₹"
_BRACKETS = re.compile(r"[([{]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z]+(?:(?:' |[' -])[A-Za-z]+)*")
_CHOICE = re.compile(
    r"(?:(?:option|choice|I (?:choose|pick|select)) )?\(?([A-Z])(?:[).]?|[).]\s+(?P<what>\S.*))", re.IGNORECASE
)
_SEVERAL_CHOICES = re.compile(r"\b(?:or|and)\b|\b[A-Z]\)")
_SYMBOLS = re.compile(r"[uvwxyz]+|[a-z](?:-[a-z])*|pi|oo|inf|infty|infinity", re.IGNORECASE)
_UNIT = re.compile(
    r"(?<=[\d}])\s*"
    r"(?:(?P<unit>\\(?:text[a-z]*|mathrm)\s*\{[^{}]*\}|(?<=\s)(?:[a-z]{2,}[a-z ]*|[mgsLhJNWVA]|[AaPp]\.?[Mm]\.?))"
    r"(?P<power>\s*\^\s*\{?[23]\}?)?|\^\s*\{?\\circ\s*\}?)$"
)
_HALF_OF_DAY = re.compile(r"[ap]\.?m\.?", re.IGNORECASE)
_MAGNITUDES = frozenset(
    ("hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "and", "or", "to")
)
_SAYS = re.compile(
    r"(?:answer|result|solution)s?\s*\**(?:is|are|:|=)+\s*\**:?\s*([^\n]+)|####\s*([^\n]+)", re.IGNORECASE
)

# "8. It is not 7" answers 8.
_FIRST_SENTENCE = re.compile(r"^(\S*[\d$)}]\S*)[.!?]\s+[A-Z].*$")


def normalized(text: str) -> str:
    """Removes dollars, a box, blanks without a meaning, and thousands separators."""
    text = _undressed(text.translate(_UNICODE).strip())
    text = _ROW_GAP.sub(r"\\\\ ", _SPLIT_THOUSANDS.sub("{,}", text))
    text = _FRACTION.sub(r"\\frac", _NOTHING.sub("", text)).replace(r"\varnothing", r"\emptyset")
    text = _NAMES.sub(r"\\\g<0> ", text)
    text = _SPACES.sub(" ", text).strip()
    text = _RATIO.sub(r"\1:\2", _COLON.sub(":", text))
    text = _BASE.sub(lambda match: f"_{{{_base(match[1])}}}", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1]}}}" if match[1] else r"\sqrt", text)
    text = _PARENTHESIS.sub(r"\\sqrt{\1}", text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"\{,\}|[ _]", "", match[0]), text)
    if not _BRACKETS.search(text):  # (1,234) is a point
        text = _COMMAS.sub(lambda match: match[0].replace(",", ""), text)
    return text


def _base(name: str) -> str:
    return str(_BASES.index(name)) if name in _BASES else "16" if name == "sixteen" else name


def _undressed(text: str) -> str:
    while True:
        before = text
        text = text.strip().strip("*").rstrip(".,;").strip()
        if (inner := boxed(text)) is not None:
            text = inner
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening + closing):
                text = text[len(opening) : -len(closing)]
        text = text.removeprefix(r"\$") if not text.startswith("$") else text[1:]
        text = text.strip(_CURRENCIES)
        if text == before:
            return text


def word(text: str) -> str | None:
    """Returns the word, phrase or choice that a normalized text is; None for mathematics and all else."""
    said = plain(text).rstrip(".")
    if choice := _CHOICE.fullmatch(said):
        is_one = choice[1].isupper() and not _SEVERAL_CHOICES.search(choice["what"] or "")
        return choice[1] if is_one else None
    if not _WORD.fullmatch(said) or _SYMBOLS.fullmatch(said):
        return None
    return said.casefold()


def plain(text: str) -> str:
    """Replaces the commands around words in a normalized text by the words."""
    return " ".join(_TEXT.sub(r" \1 ", text).split())


def unit(text: str) -> tuple[str, str]:
    """Returns (a normalized text without its unit, the unit); the unit is empty where there is none."""
    match = _UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return text, ""
    name = _TEXT.sub(r"\1", match["unit"] or "").strip()
    if _HALF_OF_DAY.fullmatch(name):
        name = name.replace(".", "").casefold()
    power = re.sub(r"[{}\s]", "", match["power"] or "")
    if any(part in _MAGNITUDES for part in name.split()):
        return text, ""
    return text[: match.start()].strip(), name + power


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """A response's answer. Where `is_prose`, the answer is somewhere in `text`."""

    text: str
    is_prose: bool


def final(response: str) -> FinalAnswer:
    """Takes the last box; else, of `<answer>` or all of the text, the answer that it names, its last line, or all."""
    if (inner := boxed(response)) is not None:
        return FinalAnswer(inner, is_prose=False)
    if (inner := tagged(response)) is not None:
        response = inner
    if said := list(_SAYS.finditer(response)):
        phrase = _FIRST_SENTENCE.sub(r"\1", said[-1][1] or said[-1][2])
        return FinalAnswer(phrase, _is_prose(phrase))
    last = next((line for line in reversed(response.splitlines()) if line.strip()), "")
    return FinalAnswer(response, is_prose=True) if _is_prose(last) else FinalAnswer(last, is_prose=False)


def _is_prose(text: str) -> bool:
    """True for three words or more, or a sentence that goes on."""
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", _TEXT.sub("", text))
    return len(words) > 2 or bool(re.search(r"[.!?:]\s+\S", _COLON.sub(":", text)))
