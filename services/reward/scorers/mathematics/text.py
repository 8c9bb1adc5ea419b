"""Brings mathematics, as people and models write it, into one form for comparison."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.reward.scorers.answers import boxed, tagged
from services.reward.scorers.mathematics.units import with_words_as_numbers

_UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–‐‑‒", "-"),
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∗": "*", "⁄": "/", "±": r"\pm ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ",
        "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "∞": r"\infty ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R} ", "ℤ": r"\mathbb{Z} ",
        "°": r"^\circ ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "…": r"\ldots ",
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f", " "),
        **dict.fromkeys("\u200b\u2060\ufeff"),
    }
)  # fmt: skip
_SUPERSCRIPT, _SUBSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "₀₁₂₃₄₅₆₇₈₉"
_RAISED = re.compile(f"[{_SUPERSCRIPT}]+")
_LOWERED = re.compile(f"[{_SUBSCRIPT}]+")
_AS_DIGITS = str.maketrans(_SUPERSCRIPT + _SUBSCRIPT, "0123456789-+n0123456789")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad\b)|~|\s+")
_SPLIT_THOUSANDS = re.compile(r"(?<=\d),\\!\s*(?=\d{3})")
_ROW_GAP = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]")
_COLON = re.compile(r"(?<=\d)\s*(?:\{\s*:\s*\}|:)\s*(?=\d)")
_RATIO = re.compile(r"^(\d+) to (\d+)$")
_BASE = re.compile(r"_\s*\{?\s*\\text\s*\{\s*(\w+)\s*\}\s*\}?")
_BASES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NOTHING = re.compile(r"\\(?:!|displaystyle\b|left(?![a-z])|right(?![a-z])|[bB]igg?[lr]?(?![a-z]))|\{\s*\}")
_FRACTION = re.compile(r"\\[dtc]frac")
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?|[a-z]|(?=[({]))|(?<![\\a-z])sqrt\s*(?=[({])|\\sqrt\s*(\d+(?:\.\d+)?)")
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp|min|max|gcd|lcm"
_NAMES = re.compile(
    rf"(?<![\\a-zA-Z])(?:(?:pi|sin|cos|tan|ln|log|lg)(?![a-zA-Z])|(?:{_FUNCTIONS})(?=\s*[({{\\^]|\s*[a-z](?![a-zA-Z])))"
)
_OPENED = re.compile(r"(?:\\sqrt|(?<=\^))\s*\(")
_WRAPPER = r"\\(?:text[a-z]*|math(?:rm|it|bf|sf)|mbox|operatorname\*?|bm|boldsymbol)"
_UPRIGHT = re.compile(
    rf"(?:{_WRAPPER}\s*\{{\s*|\{{\\(?:rm|bf|it)\s+)(?P<symbol>[abcdefijknopqrtuvwxyz]|\\[a-zA-Z]+|{_FUNCTIONS})\s*\}}"
    rf"|{_WRAPPER}\s*(?P<bare>[ei])(?![a-zA-Z])"
)
_LOOKS = re.compile(
    r"\\(?:underline|mathbf|boldsymbol|bm|mathrm|mathit|text)\s*\{\s*(-?\d[\d.,]*)\s*\}|\\(?:text)?color\s*\{[a-zA-Z]+\}"
)
_STARS = re.compile(r"(?<=[\w)}\]])\*\*(?=[\w({\\-])")
_ROOT_OF = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])\s*(\d+|[a-z])")
_SIGNED_POWER = re.compile(r"\^\s*(-\s*(?:\d+|[a-z]))")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})")
_OF_ANGLES = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_ABOUT = re.compile(
    rf"^(?:\\approx(?![a-z])|(?:{_WRAPPER}\s*\{{\s*)?\b(?:approximately|about|roughly|exactly)\b\s*\}}?)\s*",
    re.IGNORECASE,
)
_MINUS = re.compile(r"^(?:negative|minus)\s+(?=[\d\\])", re.IGNORECASE)
_MONEY = re.compile(
    rf"^(?P<sign>-?)\s*(?:{_WRAPPER}\s*\{{)?(?:(?:US|CA|AU)?\s*\\?\$|Rs\.?|(?:USD|EUR|GBP|INR|CNY|RMB)(?=[\s}}]))\s*\}}?\s*"
    r"(?=-?[\d.\\])"
)
_AND_SO_ON = re.compile(r"(?<=\d)(?<=\.\d|\d\d)\s*(?:\\[lc]?dots(?:b|m)?(?![a-z])|\.\.\.)$")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?: \d{3})+|(?:_\d{3})+|(?:\{,\}\d{3})+)(?![\d_])")
_COMMAS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_CURRENCIES = "€£¥₹"
_ALL_TEXT = re.compile(r"^\\text\s*\{\s*((?:\\?\$)?-?\d[^{}]*)\}$")
_BRACKETS = re.compile(r"[([{]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z]+(?:(?:' |[' -])[A-Za-z]+)*")
_CHOICE = re.compile(
    r"(?:(?:option|choice|I (?:choose|pick|select)) )?\(?([A-Z])(?:[).]?|[).]\s+(?P<what>\S.*))", re.IGNORECASE
)
_SEVERAL_CHOICES = re.compile(r"\b(?:or|and)\b|\b[A-Z]\)")
_SYMBOLS = re.compile(r"[uvwxyz]+|[a-z](?:-[a-z])*|pi|oo|inf|infty|infinity", re.IGNORECASE)
_SAID = r"{}s?\s*\**(?:is|are|:|=)+\s*\**:?"
_NAMED = re.compile(
    rf"(?:{_SAID.format('answer')}|####)\s*(?P<said>(?:(?!{_SAID.format('answer')})[^\n])+)", re.IGNORECASE
)
_FOUND = _SAID.format("(?:result|solution)")
_RESULT = re.compile(rf"{_FOUND}\s*(?P<said>(?:(?!{_FOUND})[^\n])+)", re.IGNORECASE)
_DENIED = re.compile(r"\W*(?:not|never|wrong|incorrect|unknown|unclear)\b", re.IGNORECASE)
_UNLIKE = re.compile(r",?\s+(?:and\s+|but\s+)?(?:definitely\s+)?not\s+\S+$", re.IGNORECASE)
_BUT = re.compile(r"^\W*not\s+\S+?,?\s+but\s+(?:rather\s+)?(?P<said>.+)$", re.IGNORECASE)
# "8. It is not 7" answers 8, "8. No, it is 7" answers 7.
_FIRST_SENTENCE = re.compile(r"^(?P<first>\S*[\d$)}]\S*?)[.!?]\**\s+(?P<rest>[A-Z].*)$", re.DOTALL)
_CORRECTED = re.compile(
    r"(?:\b(?:no|wait|actually|correction|sorry|oops|scratch that|i mean)\b[\s,.:;!…—-]*)+"
    r"(?:(?:that(?:'s| is| was) )?(?:wrong|not right|incorrect|a mistake)[\s,.;!]*)?"
    r"(?:(?:it|that)(?:'s| is| should be| must be) |make that |i get |we get )?"
    r"(?P<said>[^\n]*?)(?=[.!?](?:\s|$)|\n|$)",
    re.IGNORECASE,
)
_DEFINITE = re.compile(r"[\d\\$]|^\(?[A-Z]\)?$")


def normalized(text: str) -> str:
    """Removes dollars, a box, blanks without a meaning, thousands separators; writes words for numbers as numbers."""
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_AS_DIGITS)}}}", text.translate(_UNICODE))
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_AS_DIGITS)}}}", text)
    text = _undressed(text.strip())
    text = _ROW_GAP.sub(r"\\\\ ", _SPLIT_THOUSANDS.sub("{,}", text))
    text = _FRACTION.sub(r"\\frac", _NOTHING.sub("", text)).replace(r"\varnothing", r"\emptyset")
    text = _LOOKS.sub(lambda match: match[1] or "", text)
    text = _UPRIGHT.sub(_symbol, text)
    text = _NAMES.sub(r"\\\g<0> ", text).replace(r"\lg ", r"\log_{10} ").replace(r"\log_e", r"\ln ")
    text = _STARS.sub("^", _ROOT_OF.sub(r"\\sqrt\1{\2}", text))
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")")
    text = _SPACES.sub(" ", text).strip()
    text = _MONEY.sub(r"\g<sign>", _MINUS.sub("-", _ABOUT.sub("", text)))
    text = _RATIO.sub(r"\1:\2", _COLON.sub(":", text))
    text = _BASE.sub(lambda match: f"_{{{_base(match[1])}}}", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}" if match[1] or match[2] else r"\sqrt", text)
    text = _SIGNED_POWER.sub(r"^{\1}", _with_braces(text))
    text = _THOUSANDS.sub(lambda match: re.sub(r"\{,\}|[ _]", "", match[0]), text)
    if not _BRACKETS.search(text):  # (1,234) is a point
        text = _COMMAS.sub(lambda match: match[0].replace(",", ""), text)
    text = _AND_SO_ON.sub("", with_words_as_numbers(text))
    if _OF_ANGLES.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi }{180})", text)
    return text.strip()


def _symbol(match: re.Match[str]) -> str:
    r"""An upright `i` or `\pi` is the symbol, and `\operatorname{arcsin}` the function."""
    symbol: str = match["symbol"] or match["bare"]
    return f" \\{symbol} " if len(symbol) > 1 and symbol[0] != "\\" else f" {symbol} "


def _with_braces(text: str) -> str:
    r"""Writes `\sqrt(…)` and `^(…)` with braces, however deep the parentheses inside are."""
    start = 0
    while match := _OPENED.search(text, start):
        depth, start = 0, match.end()
        for position in range(match.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[position], 0)
            if depth == 0:
                text = f"{text[: match.end() - 1]}{{{text[match.end() : position]}}}{text[position + 1 :]}"
                break
    return text


def _base(name: str) -> str:
    return str(_BASES.index(name)) if name in _BASES else "16" if name == "sixteen" else name


def _undressed(text: str) -> str:
    while True:
        before = text
        text = text.strip().strip("*").rstrip(".,;").strip()
        if (inner := boxed(text)) is not None:
            text = inner
        text = _ALL_TEXT.sub(r"\1", text)
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
    for pattern in (_NAMED, _RESULT):
        if said := list(pattern.finditer(response)):
            last = next((match for match in reversed(said) if not _DENIED.match(match["said"])), said[-1])
            phrase = _of_phrase(last["said"], response[last.end() :])
            return FinalAnswer(phrase, _is_prose(phrase))
    last_line = next((line for line in reversed(response.splitlines()) if line.strip()), "")
    return FinalAnswer(response, is_prose=True) if _is_prose(last_line) else FinalAnswer(last_line, is_prose=False)


def _of_phrase(phrase: str, rest: str) -> str:
    """Takes the answer out of what follows `the answer is`: its first sentence, or what corrects that."""
    if match := _BUT.match(phrase):
        phrase = match["said"]
    if match := _FIRST_SENTENCE.match(phrase):
        phrase, rest = match["first"], match["rest"] + rest
    phrase = _UNLIKE.sub("", phrase.rstrip(" .*"))
    said = (match["said"].strip(" *") for match in _CORRECTED.finditer(rest))
    corrections = [text for text in said if _DEFINITE.search(text) and not _is_prose(text)]
    return corrections[-1] if corrections else phrase


_IN_MARKS = re.compile(r"\$[^$]+\$|\\\(.+?\\\)")
_WORDS_AROUND = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or|is)\b)[A-Za-z]{2,}")
_LAST_VALUE = re.compile(r"\$[^$]+\$|\\\(.+?\\\)|-?\d(?:[\d,.]*\d)?|\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}")
_DOUBT_BEFORE = re.compile(
    r"(?:\b(?:not|never|at least|at most|(?:more|less|fewer|greater|larger|smaller|other|rather) than|up to|instead of"
    r"|except|between \S+ and|\w+ or)|n['’]t(?: be)?)\s*\**$",
    re.IGNORECASE,
)
_DOUBT_BEHIND = re.compile(
    r"^[\s,]*(?:or (?:more|less|fewer|so|higher|lower|greater|above|below)\b"
    r"|(?:is|was|are|would be) (?:not|wrong|false|incorrect)|(?:isn|wasn|can)['’]?t\b|cannot be)",
    re.IGNORECASE,
)


def is_doubted(prose: str) -> bool:
    """True when the last value of the prose is denied or is the end of a range: `not 5`, `at least 5`, `5 or more`."""
    found = list(_LAST_VALUE.finditer(prose))
    if not found:
        return False
    before, behind = prose[: found[-1].start()].rstrip(), prose[found[-1].end() :]
    return bool(_DOUBT_BEFORE.search(before[-40:]) or _DOUBT_BEHIND.match(behind))


def _is_prose(text: str) -> bool:
    """True for three words or more, words around mathematics, or a sentence that goes on."""
    around = _IN_MARKS.sub("", text)
    if around != text and _WORDS_AROUND.search(around):
        return True
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", _TEXT.sub("", text))
    return len(words) > 2 or bool(re.search(r"[.!?:]\s+\S", _COLON.sub(":", text)))
