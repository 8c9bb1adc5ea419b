"""Names of weights, and what their verdicts make of tokens."""

from __future__ import annotations

import asyncio

import pytest

from services.rollout.engine.replies import BadAnswer, NamedSpan
from services.rollout.engine.weights import ServedWeights


async def test_names_decide_and_versions_do_not_decrease() -> None:
    weights = ServedWeights()
    old, new = weights.new_name(1, "engine-0"), weights.new_name(2, "engine-0")
    weights.accept([old, new])
    spans = (NamedSpan(old, 0, 4), NamedSpan(new, 4, 9))
    assert [(r.policy_version, r.start, r.end) for r in await weights.ranges_of(spans)] == [(1, 0, 4), (2, 4, 9)]
    with pytest.raises(BadAnswer, match="version 1 after 2") as caught:
        await weights.ranges_of((NamedSpan(new, 0, 4), NamedSpan(old, 4, 9)))
    assert caught.value.kind == "version_order"
    with pytest.raises(BadAnswer, match="never published"):
        await weights.ranges_of((NamedSpan("2", 0, 4),))


async def test_what_follows_refused_tokens_is_refused_with_them() -> None:
    weights = ServedWeights()
    good, bad, later = (weights.new_name(version, "engine-0") for version in (1, 2, 3))
    weights.accept([good, later])
    weights.refuse(bad)
    spans = (NamedSpan(good, 0, 4), NamedSpan(bad, 4, 6), NamedSpan(later, 6, 9))
    assert [(r.policy_version, r.start, r.end) for r in await weights.ranges_of(spans)] == [(1, 0, 4)]


async def test_tokens_wait_for_the_verdict_on_their_weights() -> None:
    weights = ServedWeights()
    name = weights.new_name(1, "engine-0")
    version = asyncio.ensure_future(weights.version_of(name))
    await asyncio.sleep(0)  # it runs up to its wait
    assert not version.done()
    weights.accept([name])
    assert await version == 1


async def test_weights_of_a_trainer_that_started_again_before_them_are_refused() -> None:
    weights = ServedWeights()
    lost, kept = weights.new_name(5, "engine-0"), weights.new_name(3, "engine-0")
    weights.accept([lost])
    weights.switch_to(5)
    weights.accept([kept])
    weights.switch_to(3)
    assert await weights.version_of(lost) is None
    assert await weights.version_of(kept) == 3


async def test_names_are_forgotten_in_the_end_but_never_before_their_verdict() -> None:
    weights = ServedWeights()
    first = weights.new_name(1, "engine-0")
    for version in range(20_000):
        weights.accept([weights.new_name(version, "engine-1")])
    assert weights.engine_of(first) == "engine-0"
    weights.refuse(first)
    weights.accept([weights.new_name(9, "engine-1")])
    assert weights.engine_of(first) is None
