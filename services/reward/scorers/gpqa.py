"""Multiple choice, as in GPQA: 1 when the answer is the right letter, or the text of the right choice; else 0.

The label is the letter, the number of the choice counted from 0, or the choice's text. `metadata.choices` are the
texts, in order or by letter; `metadata.correct_letter` and `metadata.valid_letters` may say more.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from headrace.errors import InvalidArgument
from headrace.limits import whole_number
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking, boxed, last_line, tagged, with_ascii_signs
from services.reward.scorers.math_text import with_plain_digits

_LETTERS = string.ascii_uppercase
_DEFAULT_LETTERS = "ABCDEFGH"
_LETTER = r"(?P<{}>(?-i:[A-Z])(?![A-Za-z\d'’])|[a-z](?=\W*(?:\n|$)))"
# OpenAI's simple-evals read answers in these languages as well.
_ANSWER = (
    r"(?:(?<![^\W_])(?:(?:answer|choice|option|guess)s?|respuesta|réponse|resposta|risposta|antwort|ответ|jawaban|jibu)\b"
    r"|答案|答え|回答|解答|选项|정답|답변|답|الإجابة|الجواب|उत्तर|উত্তর)"
    r"(?:\s+(?:to|for)\b[^.\n:]{0,60}?|\s+(?:correct[aeo]?|finale?)\b)?"
)
_SURELY = (
    r"(?:,?\s*(?:then|here|therefore|thus|hence|clearly|obviously|certainly|definitely|probably|(?:most )?likely"
    r"|possibly|of course|indeed|simply|actually)\b,?){0,3}"
)
_IS = (
    _SURELY + r"(?:'?\s*(?:['’]s\b|(?:is|are|(?:would|should|must|will|has to|seems to|appears to) be|ist|est|es|é|è)\b"
    r"|是|为|选|[:=>\]])){1,4}" + _SURELY
)
_OPENED = r"[\s:(\[{']{0,9}(?:(?:option|choice|answer|la|le)\s*[(\[]*)?"
_NOT = r"(?:\bnot|n['’]t)\s+"
_SAID = re.compile(
    _ANSWER + _IS + _OPENED + _LETTER.format("is")
    + r"|\b(?:choose|chose|pick|select|go with|going with|opt for|I(?:['’]d| would) say|lean(?:ing)? towards?|leaves"
    r"|(?:corresponds to|matches) (?=option|choice))\b"
    + _OPENED + _LETTER.format("chosen")
    + r"|(?<![\w'’])(?P<right>(?-i:[A-Z]))[\])]*(?::[^\n.]{1,80})?\s+"
    r"(?:is|must be|should be|(?:seems|looks|appears)(?: to be)?)\s+"
    r"(?:therefore |clearly |thus )?"
    r"(?:the\s+)?(?:only\s+)?(?:correct|right|best)\b"
    r"(?!(?:\s+(?:answer|choice|option))?\s+(?:only\s+)?(?:if|when|unless|for)\b)"
    + "|" + _NOT + r"(?:option |choice )?\(?[A-Z]\)?[,;.]?\s+(?:but\s+(?:rather |instead )?|it(?:\s+is|['’]s)\s+)"
    + _OPENED + _LETTER.format("but")
    + r"|\banswer\s+\(?" + _LETTER.format("behind") + r"(?=[\s.)\]]*(?:\n|$))",
    re.IGNORECASE,
)  # fmt: skip
_STATED = re.compile(_ANSWER + _IS + r"\s*(?P<text>[^\n]+)", re.IGNORECASE)
_DENIED = re.compile(
    rf"(?:{_NOT}|\bnever\s+|\b(?:doubt|deny|{_NOT}(?:think|believe|say))\s+(?:that\s+)?(?:the\s+)?(?:\w+\s+)?)$",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"\"[^\"\n]*\"|“[^”\n]*”|(?<!\w)'[^'\n]*'(?!\w)")
_UNSURE = re.compile(
    r"[\s)\]]*(?:[,;/&?(]|或|\b(?:or|and|oder|ou|o|und|et|y|e)\b)(?:\s*(?:and|or|maybe|perhaps|possibly|also)\b)*"
    r"[\s(\[]*(?:option |choice )?(?P<other>(?-i:[A-Z]))(?![\w'’])(?![\s)]+(?:is|was|are|can|does|has|would)\b)",
    re.IGNORECASE,
)
_SEVERAL = re.compile(
    r"[\s(\[]*[A-Z][\s)\].]*(?:(?:,|/|&|;|and\b|or\b)[\s,(\[]*(?:and\b|or\b)?[\s(\[]*[A-Z][\s)\].]*)+"
)
_ALONE = re.compile(
    r"\W*(?:(?:(?:final |correct |my |best )*(?:answer|option|choice|guess)|it(?:['’]s| is)"
    r"|i (?:think|believe|say|guess)|so|thus|therefore|hence|probably|perhaps|maybe|(?:most )?likely)\b\W*)*"
    r"([A-Za-z])[\s)\].:,!]*(?:\(?\d+\s*%\)?\.?|i (?:think|believe|guess)[\s.!]*|not (?:option )?[A-Z][\s.!]*)?",
    re.IGNORECASE,
)
_BEGINS = re.compile(r"[\s_']*(?<![A-Za-z\d])\(?(?:(?:Option|Choice) )?([A-Z])[).:]")
_WRAPPER = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|mbox|boldsymbol)\s*\{([^{}]*)\}")
_MARKS = re.compile(r"\\[()\[\]]|\*+|__|(?<!\w)_(?=\w)|(?<=\w)_(?!\w)|[$`\"“”]")
_BLANKS = re.compile(r"\W+")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


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
        answer = _unmarked(answer).strip()
        if (alone := _ALONE.fullmatch(answer)) and alone[1].upper() in self.letters:
            return alone[1].upper()
        for plain in (_plain, _words):
            named = [
                letter
                for letter, text in self.texts.items()
                if plain(answer) in (plain(text), plain(f"{letter} {text}"), plain(f"({letter}) {text}"))
            ]
            if len(named) == 1:
                return named[0]
        begins = _BEGINS.match(answer)
        others = set(_BEGINS.findall(answer)) - {begins[1]} if begins else ()
        return begins[1] if begins and begins[1] in self.letters and not others else None

    def stated(self, text: str) -> str | None:
        """The choice that the text's last statement about the answer names; empty where that names several."""
        text = _unmarked(_without_quoted_statements(text))
        last: tuple[int, str] | None = None
        for match in _SAID.finditer(text):
            letter = next(letter for letter in match.groupdict().values() if letter).upper()
            if letter in self.letters and not _is_denied(text, match.start()):
                other = _UNSURE.match(text, match.end())
                last = match.start(), "" if other and other["other"].upper() in self.letters else letter
        for match in _STATED.finditer(text) if self.texts else ():
            named = next(filter(None, map(self.letter, _beginnings(match["text"]))), None)
            if _is_denied(text, match.start()):
                continue
            if named is not None and (last is None or match.start() >= last[0]) and not (last and last[1] == ""):
                last = match.start(), named
        return last[1] if last else None


def score(item: ScoreItem) -> float:
    """Raises InvalidArgument when the right choice cannot be told from label and metadata."""
    question = _Question.of(item)
    text = with_ascii_signs(after_thinking(item.response))
    for answer in (*reversed(_boxes(text)), tagged(text)):
        if answer is None:
            continue
        if (letter := question.letter(answer)) is not None:
            return float(letter == question.right)
        if _SEVERAL.fullmatch(_unmarked(answer)):
            return 0.0
    stated = question.stated(text)
    return float((question.letter(last_line(text)) if stated is None else stated) == question.right)


def _boxes(text: str) -> list[str]:
    starts = [match.start() for match in _BOX.finditer(text)]
    contents = (boxed(text[start:end]) for start, end in pairwise([*starts, len(text)]))
    return [content for content in contents if content is not None]


def _beginnings(text: str) -> list[str]:
    """Returns a statement, and its part before the first full stop or comma: the rest may be the reason."""
    return [text, *(text[: match.start()] for match in re.finditer(r"[.,;](?=\s|$)|\s(?=because|since|as)\b", text))]


def _is_denied(text: str, start: int) -> bool:
    return _DENIED.search(text[max(0, start - 40) : start]) is not None


def _without_quoted_statements(text: str) -> str:
    """Removes what others say that the answer is; a letter in quotation marks stays, and a text that is all in them."""
    whole = text.strip()
    return _QUOTED.sub(lambda match: match[0] if match[0] == whole or not _SAID.search(match[0]) else "", text)


def _unmarked(text: str) -> str:
    """Removes the marks of Markdown and LaTeX around words."""
    for _ in range(2):
        text = _WRAPPER.sub(r"\1", text)
    return _MARKS.sub("", text)


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
    return re.sub(r"[\s{}\\_]+", "", with_plain_digits(_unmarked(with_ascii_signs(text)))).rstrip(".").casefold()


def _words(text: str) -> str:
    return _BLANKS.sub(" ", text).strip().lower()
