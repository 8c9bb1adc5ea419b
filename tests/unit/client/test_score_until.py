"""The one loop around a score: calls of a bounded size, one deadline, and a second try for a retryable item."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from headrace.client.reward import score_until
from headrace.errors import HeadraceError, Unavailable
from headrace.limits import MAX_SCORE_ITEMS_PER_CALL
from headrace.score import Score, ScoreError, ScoreItem, ScoreResult


def items(count: int) -> list[ScoreItem]:
    return [ScoreItem(str(i), "", "", label=None, metadata={}) for i in range(count)]


def always(_: HeadraceError) -> bool:
    return True


async def test_a_retryable_item_is_asked_for_once_more_and_keeps_its_second_answer() -> None:
    asked: Counter[str] = Counter()

    async def ask(some: Sequence[ScoreItem], _: float) -> Sequence[ScoreResult]:
        asked.update(item.item_id for item in some)
        timeout = ScoreError("SCORER_TIMEOUT", f"try {asked['1']}", retryable=True)
        return [
            {"1": timeout, "2": ScoreError("SCORER_RAISED", "bug")}.get(i.item_id, Score(1.0, "s", "1")) for i in some
        ]

    scored = await score_until(time.monotonic() + 60, items(3), ask, always)
    assert [str(type(result).__name__) for result in scored] == ["Score", "ScoreError", "ScoreError"]
    assert asked == {"0": 1, "1": 2, "2": 1}
    assert scored[1] == ScoreError("SCORER_TIMEOUT", "try 2", retryable=True)


async def test_a_call_that_fails_is_made_again_without_those_that_were_answered() -> None:
    sizes: list[int] = []

    async def ask(some: Sequence[ScoreItem], _: float) -> Sequence[ScoreResult]:
        sizes.append(len(some))
        if len(sizes) == 2:
            raise Unavailable("it restarts", retry_after_seconds=0.0)
        return [Score(float(item.item_id), "s", "1") for item in some]

    scored = await score_until(time.monotonic() + 60, items(MAX_SCORE_ITEMS_PER_CALL + 2), ask, always)
    assert [score.value for score in scored if isinstance(score, Score)] == [*range(MAX_SCORE_ITEMS_PER_CALL + 2)]
    assert sizes == [MAX_SCORE_ITEMS_PER_CALL, 2, 2]
