"""Brings mathematics, as people and models write it, into one form for comparison, with units and several solutions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.reward.scorers.answers import boxed, tagged

_UNIT_WRAPPER = r"\\(?:text[a-z]*|math(?:rm|it|bf|sf)|mbox|operatorname)"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_WRAPPED = rf"{_UNIT_WRAPPER}\s*\{{[^{{}}]*\}}{_POWER}"
_UNIT_DEGREES = rf"\^\s*(?:\\circ(?![a-z])|\{{\s*\\circ\s*\}})(?:\s*(?:[CF]|{_UNIT_WRAPPER}\s*\{{\s*[CF]\s*\}}))?"
_WORDS = rf"(?<=\s)[A-Za-zµΩ][A-Za-zµΩ./ ]*{_POWER}"
_WRAPPED_UNITS = rf"(?:{_WRAPPED}\s*(?:(?:/|\\cdot(?![a-z]))\s*)?)+"
_IN_PARENTHESES = r"(?<=\d)\s+\([A-Za-z][A-Za-z ]{2,}\)"
_UNIT = re.compile(rf"\s*(?P<unit>{_WRAPPED_UNITS}|(?<=[\d)}}\]i])\s*{_WORDS}|{_IN_PARENTHESES}|{_UNIT_DEGREES})$")
_DEGREE = re.compile(r"\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})|\\circ(?![a-z])")
_CURRENCY = re.compile(r"\s*\\?[$€£¥₹¢]\s*")
_ENDS_IN_A_VALUE = re.compile(r"[\dA-Za-z)}\]|!]$")
_WRAPPED_TEXT = re.compile(rf"{_UNIT_WRAPPER}\s*\{{([^{{}}]*)\}}")
_UNIT_TEXT = re.compile(r"[A-Za-zµΩ°'’()./·*\- ]*(?:(?<=[A-Za-z])\^?\{?-?[1-4]\}?[A-Za-z/·* ]*)*")
_UNIT_WORD = re.compile(r"[A-Za-zµΩ]+")
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
    rf"{_NUMBER}[\s-]*(?P<open>{_UNIT_WRAPPER}\s*\{{\s*)?(?P<word>{'|'.join(_MAGNITUDES)}|dozen)\b", re.IGNORECASE
)
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "fourth": 4, "quarter": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000, "millionth": 10**6, "billionth": 10**9,
}  # fmt: skip
_PART = re.compile(
    rf"(?P<number>\d+)[\s-]*(?P<open>{_UNIT_WRAPPER}\s*\{{\s*)?(?P<word>{'|'.join(_PARTS)})s?\s*\}}?$", re.IGNORECASE
)
_RAISED_UNIT = re.compile(
    rf"(?P<base>(?:\d|\)|(?<![A-Za-z])[A-Za-z]))\s*(?:{_UNIT_WRAPPER}\s*\{{\s*)?(?P<word>squared|cubed|factorial)\b\s*\}}?",
    re.IGNORECASE,
)
_RAISED_TO = {"squared": "^{2}", "cubed": "^{3}", "factorial": "!"}
_PERCENT = re.compile(rf"\s*(?:{_UNIT_WRAPPER}\s*\{{\s*)?\bper\s?cent\b\s*\}}?", re.IGNORECASE)
_ORDINAL = re.compile(rf"(?<=\d)\s*(?:\^\s*)?\{{?\s*(?:{_UNIT_WRAPPER}\s*\{{\s*)?(?:st|nd|rd|th)\s*\}}*$")


def with_words_as_numbers(text: str) -> str:
    r"""Writes `5 million` as `5\cdot 10^{6}`, `3 halves` as a fraction, `5 squared` as a power."""
    text = _MAGNITUDE.sub(_magnitude, text)
    text = _PART.sub(lambda match: rf"\frac{{{match['number']}}}{{{_PARTS[match['word'].lower()]}}}", text)
    text = _RAISED_UNIT.sub(lambda match: match["base"] + _RAISED_TO[match["word"].lower()], text)
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
    content = _DEGREE.sub(" deg ", _WRAPPED_TEXT.sub(r" \1 ", said)).replace(r"\cdot", "·")
    if not value or not _ENDS_IN_A_VALUE.search(value) or not _is_unit(content, is_wrapped="{" in said):
        return text, ""
    return value, _name(content)


def _is_unit(content: str, *, is_wrapped: bool) -> bool:
    if not content.strip():
        return True
    if _CURRENCY.fullmatch(content):
        return True
    plain = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", content)
    words = _UNIT_WORD.findall(plain)
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
    text = _undressed(with_plain_digits(text.translate(_UNICODE)).strip())
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


def with_plain_digits(text: str) -> str:
    """Writes raised and lowered digits as LaTeX does: `10⁻³` as `10^{-3}`."""
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_AS_DIGITS)}}}", text)
    return _LOWERED.sub(lambda match: f"_{{{match[0].translate(_AS_DIGITS)}}}", text)


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
