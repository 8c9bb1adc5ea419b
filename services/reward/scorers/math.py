r"""Mathematics: 1 when a response's answer equals the label, else 0.

The last boxed answer counts if there is one; otherwise what the response says that its answer is; otherwise the last
expression that math-verify finds. Words, plain numbers and values are compared here, all else by math-verify. Labels
may be plain (`3/4`), LaTeX (`\frac{3}{4}`, `$…$`) or boxed.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import FiniteSet, Interval, Tuple

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.scorers import math_values
from services.reward.scorers.answers import after_thinking, final_part, right_answers
from services.reward.scorers.math_numbers import is_same, number
from services.reward.scorers.math_text import final, is_doubted, normalized, plain, solutions, unit, word
from services.reward.scorers.math_values import is_too_large

# An answer further from the end is not the final one, and math-verify's patterns are slow on megabytes.
_TAIL_CHARACTERS = 4000
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
_COMMANDS = re.compile(r"\\[a-zA-Z]+")
_SMALL = re.compile(r"(?<!\d)0?\.(0+)[1-9]")
_NAMED = re.compile(r"\s*([a-zA-Z])\s*=")
_PERCENT = re.compile(r"\s*\\?%$")
_ROUNDING = 6
_APPROXIMATELY = re.compile(r"\\(?:approx(?:eq)?|simeq|cong|doteq)(?![a-z])")
# What leaves the choice, the rounding or the whole problem to the scorer is no answer, unless the label is so written.
_UNFINISHED = re.compile(
    r"\\(?:min|max|inf|sup|gcd|lcm|[lr]?floor|[lr]?ceil|[bp]?mod|sum|prod|i{0,2}int|lim|det|arg(?:min|max))(?![a-z])"
)
# math-verify adds neighbours: it takes `4 2` for 6.
_ADJACENT = re.compile(r"(?<!frac)(?<!frac )(?<!binom )(?<![\d.^_])\d+(?:\.\d+)?\s+\d|\d_\{?\d|\\phantom")
_POWER_OF_TEN = re.compile(r"^(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})$")
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?){2,}")
_EXTRACTION = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
)
_CASE = {False: re.RegexFlag.NOFLAG, True: re.IGNORECASE}


def score(item: ScoreItem) -> float:
    """Raises InvalidArgument without a label, or with one that is no mathematics: no answer could match it."""
    right = labels(item)
    tail = after_thinking(item.response)[-_TAIL_CHARACTERS:]
    answer = final(tail)
    text = normalized(answer.text)
    is_right = _is_found if answer.is_prose else _is_equal
    return float(any(is_right(label, text) for label in right))


def labels(item: ScoreItem) -> list[str]:
    """The right answers, normalized. Raises InvalidArgument without one, or where no answer could match it."""
    if not item.label:
        raise InvalidArgument("scorer math compares with the label, and the item has none: set --label-key")
    right = [normalized(final_part(text)) for text in right_answers("math", item.label)]
    if not all(right) or not right:
        raise InvalidArgument(f"scorer math cannot read the label {item.label!r:.80}: write a number, LaTeX or a word")
    return right


def _is_found(label: str, prose: str) -> bool:
    """True when the last expression of the prose, or the word that begins or ends it, is the label."""
    if (wanted := word(label)) is not None:
        says = re.compile(
            rf"^{re.escape(wanted)}[,.:;]|(?<![\w-])(?<!\bnot )(?<!n't )(?<!\bor ){re.escape(wanted)}\)?$",
            _CASE[len(wanted) > 1],
        )
        return bool(says.search(prose))
    if is_too_large(label) or is_too_large(prose) or is_doubted(prose):
        return False
    return _verified(_parsed(label), _with_constants(parse(prose, parsing_timeout=None)), label)


def _is_equal(label: str, answer: str) -> bool:
    if not answer:
        return False
    if plain(label) == plain(answer):
        return True
    if word(label) is not None or word(answer) is not None:
        return word(label) == word(answer)
    if _APPROXIMATELY.search(answer) and not _APPROXIMATELY.search(label):
        return _is_approximated(label, [member.strip() for member in _APPROXIMATELY.split(answer)])
    if _RATIO.fullmatch(label) or _RATIO.fullmatch(answer):
        return _proportions(label) == _proportions(answer)
    if _UNFINISHED.search(_members(answer)[-1]) and not _UNFINISHED.search(label):
        return False
    return _is_same_mathematics(label, answer)


def _is_same_mathematics(label: str, answer: str) -> bool:
    of_label, of_answer = solutions(label), solutions(answer)
    if of_label.names and of_answer.names and of_label.names != of_answer.names:
        return False
    members = [] if _EQUALS.search(of_label.text) else _members(of_answer.text)
    if len(members) > 1 and not _holds(of_label.text, members):
        return False
    (wanted, wanted_unit), (given, given_unit) = unit(of_label.text), unit(of_answer.text)
    if wanted_unit and given_unit and wanted_unit != given_unit:
        return False
    if (same := _is_same_number(wanted, given)) is not None:
        return same
    if _ADJACENT.search(given) and not _ADJACENT.search(wanted):
        return False
    return _is_verified(_with_power(wanted), _with_power(given))


def _is_same_number(label: str, answer: str) -> bool | None:
    """Compares plain numbers; a percentage is its share or the number before the sign. None for all else."""
    left, right = (number(_PERCENT.sub("", text)) for text in (label, answer))
    if left is None or right is None:
        return None
    shares = [
        plain_number.value / (100 if _PERCENT.search(text) else 1)
        for plain_number, text in ((left, label), (right, answer))
    ]
    is_the_share = left.names_base == right.names_base and shares[0] == shares[1]
    return is_the_share or is_same(left, right)


def _with_power(text: str) -> str:
    """Writes `1e-3` so that math-verify reads no Euler's number in it."""
    return _POWER_OF_TEN.sub(r"\1\\cdot 10^{\2}", text)


def _holds(label: str, members: list[str]) -> bool:
    """True when every number in a chain of equations is the label: for 8, `x = 16/2 = 8` holds and `7 = 8` does not."""
    numbers = [member.strip() for member in members if not re.search("[a-zA-Z|]", _COMMANDS.sub("", member))]
    return all((_is_verified if _UNFINISHED.search(member) else _is_equal)(label, member) for member in numbers)


def _members(text: str) -> list[str]:
    """Splits a chain of equations at the signs that stand outside of brackets."""
    members, start = [], 0
    for match in _EQUALS.finditer(text):
        before = text[: match.start()]
        if all(before.count(opening) == before.count(closing) for opening, closing in ("{}", "()", "[]")):
            members.append(text[start : match.start()])
            start = match.end()
    return [*members, text[start:]]


def _is_approximated(label: str, members: list[str]) -> bool:
    r"""True when a member is the label and the numbers agree: `\sqrt 2 \approx 1.41` does, `42 \approx 43` does not."""
    constants = [(text, value) for member in members if (value := _constant(text := _members(member)[-1])) is not None]
    return any(_is_equal(label, member) for member in members) and all(
        value == constants[0][1] or _is_rounded(constants[0][1], value, text) for text, value in constants[1:]
    )


def _constant(text: str) -> Fraction | None:
    """Returns the value of a number or a constant expression, to forty digits."""
    given, _ = unit(text.strip())
    if plain_number := number(_PERCENT.sub("", given)):
        return plain_number.value
    parsed = [] if is_too_large(given) else _parsed(given)
    return math_values.approximated(parsed[0]) if parsed else None


def _is_rounded(value: Fraction, rounded: Fraction, text: str) -> bool:
    _, _, decimals = text.partition(".")
    last_digit = Fraction(1, 10 ** len(re.match(r"\d*", decimals)[0]))  # type: ignore[index]
    return 0 <= abs(value) - abs(rounded) < last_digit or 2 * abs(value - rounded) <= last_digit


def _proportions(text: str) -> list[Fraction]:
    parts = [Fraction(part.strip()) for part in text.split(":")] if _RATIO.fullmatch(text) else []
    return [part / total for part in parts] if (total := sum(parts)) else parts


def _is_verified(label: str, answer: str) -> bool:
    if is_too_large(label) or is_too_large(answer):
        return False
    names = [match[1] for text in (label, answer) if (match := _NAMED.match(text))]
    if len(set(names)) > 1:  # x = 1 is not y = 1
        return False
    return _verified(_parsed(label), _parsed(answer), label + answer)


def _verified(gold: list[Any], target: list[Any], texts: str) -> bool:
    if not _same_kind(gold, target):
        return False
    if gold and target and (same := math_values.is_same(gold[0], target[0])) is not None:
        return same
    precision = math_values.precision(gold[:1] + target[:1])
    if precision is None:
        return False
    # Decimals are compared to six places behind the zeros that they begin with.
    rounding = _ROUNDING + max((len(zeros) for zeros in _SMALL.findall(texts)), default=0)
    return bool(
        verify(
            gold,
            target,
            float_rounding=rounding,
            numeric_precision=precision,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def _same_kind(gold: list[Any], target: list[Any]) -> bool:
    """False for a set against a point or an interval, which math-verify may take for the same.

    A point may lack its parentheses: the label `(2,3)` matches `2, 3`.
    """
    if not gold or not target:
        return True
    if isinstance(gold[0], FiniteSet):
        return not isinstance(target[0], Tuple | Interval)
    if isinstance(gold[0], Tuple | Interval) and isinstance(target[0], FiniteSet):
        return not str(target[-1]).startswith(r"\{")
    return True


def _parsed(text: str) -> list[Any]:
    """Returns nothing unless the whole text parses: a part of an answer is another answer."""
    return _with_constants(parse(f"${text}$", [_EXTRACTION], parsing_timeout=None))


def _with_constants(parsed: list[Any]) -> list[Any]:
    return [math_values.with_constants(expression) for expression in parsed]
