"""Mathematics, judged by math-verify: 1 when an answer in the response equals the label, else 0.

The response's last boxed answer counts if it has one; otherwise the expression that math-verify finds, the last of the
response first. Labels may be plain (`3/4`), LaTeX (`\\frac{3}{4}`, `$…$`) or boxed.
"""

from __future__ import annotations

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from headrace.errors import InvalidArgument
from headrace.judgement import ScoreItem
from services.reward.scorers.answers import after_thinking, boxed

# An answer further from the end is not the final one, and math-verify's patterns are slow on megabytes.
_TAIL_CHARACTERS = 4000


def score(item: ScoreItem) -> float:
    """Raises InvalidArgument without a label, or with one that is no mathematics: no answer could match it."""
    if not item.label:
        raise InvalidArgument("scorer math compares with the label, and the item has none: set --label-key")
    gold = _parsed(item.label)
    if not gold:
        raise InvalidArgument(f"scorer math cannot read the label {item.label!r:.80}: write a number or LaTeX")
    tail = after_thinking(item.response)[-_TAIL_CHARACTERS:]
    answer = boxed(tail)
    target = _parsed(answer) if answer is not None else parse(tail, parsing_timeout=None)
    return float(verify(gold, target, timeout_seconds=None))


def _parsed(text: str) -> list[object]:
    inner = boxed(text) or text.strip().strip("$")
    # Plain numbers read better without dollars ("1,000", "50%"), formulas only within them.
    found: list[object] = parse(
        f"${inner}$", [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None
    ) or parse(inner, parsing_timeout=None)
    return found
