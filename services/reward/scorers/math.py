r"""Mathematics: 1 when a response's answer equals the label, else 0.

The last boxed answer counts if there is one; otherwise what the response says that its answer is; otherwise the last
expression that math-verify finds. Words and plain numbers are compared here, all else by math-verify. Labels may be
plain (`3/4`), LaTeX (`\frac{3}{4}`, `$…$`) or boxed.
"""

from __future__ import annotations

import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import FiniteSet, Interval, Tuple

from headrace.errors import InvalidArgument
from headrace.score import ScoreItem
from services.reward.scorers.answers import after_thinking, final_part, right_answers
from services.reward.scorers.mathematics.number import is_same, number
from services.reward.scorers.mathematics.size import is_too_large
from services.reward.scorers.mathematics.solutions import solutions
from services.reward.scorers.mathematics.text import final, normalized, plain, unit, word

# An answer further from the end is not the final one, and math-verify's patterns are slow on megabytes.
_TAIL_CHARACTERS = 4000
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
_COMMANDS = re.compile(r"\\[a-zA-Z]+")
_SMALL = re.compile(r"(?<!\d)0?\.(0+)[1-9]")
_NAMED = re.compile(r"\s*([a-zA-Z])\s*=")
_PERCENT = re.compile(r"\s*\\?%$")
_ROUNDING = 6
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
        says = re.compile(rf"^{re.escape(wanted)}[,.:;]|(?<![\w-]){re.escape(wanted)}\)?$", _CASE[len(wanted) > 1])
        return bool(says.search(prose))
    if is_too_large(label) or is_too_large(prose):
        return False
    return _verified(_parsed(label), parse(prose, parsing_timeout=None), label)


def _is_equal(label: str, answer: str) -> bool:
    if not answer:
        return False
    if plain(label) == plain(answer):
        return True
    if word(label) is not None or word(answer) is not None:
        return word(label) == word(answer)
    of_label, of_answer = solutions(label), solutions(answer)
    if of_label.names and of_answer.names and of_label.names != of_answer.names:
        return False
    label, answer = of_label.text, of_answer.text
    if not _EQUALS.search(label):
        members = _EQUALS.split(answer)
        if len(members) > 1 and not _holds(label, members):
            return False
    (wanted, of), (given, in_unit) = unit(label), unit(answer)
    if of and in_unit and of != in_unit:
        return False
    left, right = number(_PERCENT.sub("", wanted)), number(_PERCENT.sub("", given))
    if left and right:
        return is_same(left, right)
    return _is_verified(wanted, given)


def _holds(label: str, members: list[str]) -> bool:
    """True when every number in a chain of equations is the label: for 8, `x = 16/2 = 8` holds and `7 = 8` does not."""
    numbers = [member.strip() for member in members if not re.search("[a-zA-Z|]", _COMMANDS.sub("", member))]
    return all(_is_equal(label, member) for member in numbers)


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
    # Decimals are compared to six places behind the zeros that they begin with.
    rounding = _ROUNDING + max((len(zeros) for zeros in _SMALL.findall(texts)), default=0)
    return bool(verify(gold, target, float_rounding=rounding, allow_set_relation_comp=True, timeout_seconds=None))


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
    found: list[Any] = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)
    return found
