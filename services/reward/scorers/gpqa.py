"""Multiple choice, as in GPQA: 1 when the answer is the right letter, or the text of the right choice; else 0.

The label is the letter, the number of the choice counted from 0, or the choice's text. `metadata.choices` are the
texts, in order or by letter; `metadata.correct_letter` and `metadata.valid_letters` may say more.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.digits import whole_number
from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking, boxed, last_line, tagged

_LETTERS = string.ascii_uppercase
_DEFAULT_LETTERS = "ABCDEFGH"
_SAID = re.compile(
    r"(?i:answer|choice|option)\b\s*(?i:is|would be|should be)?\s*[:=]?\s*[\"'*_(\[{]*(?:\\(?:text|mathrm)\{)?"
    r"(?:([A-Z])(?![\w'])|([a-z])(?=[\"'*_)\]}.]*\s*(?:\n|$)))"
)
_ALONE = re.compile(r"[\s\"'*_(\[{.]*(?:\\(?:text|mathrm|textbf)\{)?\(?([A-Za-z])\)?[\s\"'*_)\]}.:,]*")
_BLANKS = re.compile(r"\W+")


@dataclass(frozen=True, slots=True)
class _Question:
    """The choices by letter, and the right one."""

    letters: str
    texts: Mapping[str, str]
    right: str

    @classmethod
    def of(cls, item: ScoreItem) -> _Question:
        texts = _texts(item.metadata.get("choices"))
        letters = item.metadata.get("valid_letters") or "".join(texts) or _DEFAULT_LETTERS
        letters = "".join(str(letter).strip().upper() for letter in letters)
        right = _right(item.metadata.get("correct_letter") or item.label, letters, texts)
        return cls(letters, texts, right)

    def letter(self, answer: str) -> str | None:
        """The choice that an answer names: by its letter, by letter and text, or by text."""
        if (alone := _ALONE.fullmatch(answer)) and alone[1].upper() in self.letters:
            return alone[1].upper()
        for letter, text in self.texts.items():
            if _plain(answer) in (_plain(text), _plain(f"{letter} {text}")):
                return letter
        begins = re.match(r"[\s*_\"']*\(?([A-Z])[).:]", answer)
        return begins[1] if begins and begins[1] in self.letters else None


def score(item: ScoreItem) -> float:
    """Raises InvalidArgument when the right choice cannot be told from label and metadata."""
    question = _Question.of(item)
    text = after_thinking(item.response)
    for answer in (boxed(text), tagged(text)):
        if answer is not None:
            return float(question.letter(answer) == question.right)
    named = ((upper or lower).upper() for upper, lower in _SAID.findall(text))
    said = [letter for letter in named if letter in question.letters]
    if said:
        return float(said[-1] == question.right)
    return float(question.letter(last_line(text)) == question.right)


def _texts(choices: object) -> dict[str, str]:
    match choices:
        case None:
            return {}
        case dict():
            return {str(letter).strip().upper(): str(text) for letter, text in choices.items()}
        case list() if len(choices) <= len(_LETTERS):
            return dict(zip(_LETTERS, map(str, choices), strict=False))
        case _:
            raise InvalidArgument(
                f"scorer gpqa: metadata.choices is {choices!r:.80}: write a list of at most {len(_LETTERS)} texts, or "
                "an object of letters and texts"
            )


def _right(named: object, letters: str, texts: Mapping[str, str]) -> str:
    name = str(named).strip() if named is not None else ""
    if len(name) == 1 and name.upper() in letters:
        return name.upper()
    for letter, text in texts.items():
        if name and _plain(text) == _plain(name):
            return letter
    if (number := whole_number(name, len(letters) - 1)) is not None:
        return letters[number]
    raise InvalidArgument(
        f"scorer gpqa: {name!r:.80} is none of the choices {', '.join(letters)}: set --label-key to the letter, the "
        "choice's number from 0 or its text, or give metadata.correct_letter"
    )


def _plain(text: str) -> str:
    return _BLANKS.sub(" ", text).strip().lower()
