"""The arithmetic of the bench of long responses."""

from __future__ import annotations

import pytest

from headrace.api.sample.v1 import sample_pb2
from tests.bench.long_tails import (
    GROUPS,
    MEAN_TOKENS,
    SAMPLES,
    SETTINGS,
    SIGMAS,
    SLOTS,
    WARM_STEPS,
    Figures,
    Lengths,
    Step,
    measuring,
    seconds_per_token,
)
from tests.support import virtual_time


@pytest.mark.parametrize("sigma", SIGMAS)
def test_lengths_have_one_mean_and_are_the_same_in_every_run(sigma: float) -> None:
    assert Lengths(sigma).mean(300) == pytest.approx(100, rel=0.1)
    assert Lengths(sigma).of(7, 3, 0) == Lengths(sigma).of(7, 3, 0)
    assert len({Lengths(sigma).of(7, 3, draw) for draw in range(8)}) > 1


def test_a_slot_is_slower_the_more_of_them_are_in_use() -> None:
    assert seconds_per_token(0.01, SLOTS) == pytest.approx(0.01)
    assert seconds_per_token(0.01, 1) < seconds_per_token(0.01, SLOTS // 2) < 0.01


def test_figures_are_those_of_the_steps_after_the_first_ones() -> None:
    steps = [
        Step(10.0, 100, [sample((0, 100, False))]),
        Step(12.0, 200, [sample((0, 30, True), (1, 10, False))]),
        Step(15.0, 300, [sample((1, 20, False)), sample((2, 20, False))]),
    ]
    figures = Figures.of(steps, warm=1)
    assert (figures.seconds, figures.length, figures.trained) == (2.5, 80 / 3, 25)
    assert (figures.masked, figures.lost, figures.stale) == (1 - 50 / 80, 1 - 80 / 200, 20 / 50)


def test_on_policy_a_step_of_real_services_takes_as_long_as_its_longest_response_and_training() -> None:
    async def on_policy() -> Figures:
        async with measuring(1.0, 1) as figures:
            return await figures(Lengths(1.0), SETTINGS["on-policy"])

    seconds, done = 1.0, 0
    groups = range(WARM_STEPS * GROUPS, (WARM_STEPS + 1) * GROUPS)
    lengths = sorted(Lengths(1.0).of(group, index, 0) for group in groups for index in range(SAMPLES))
    for in_use, length in zip(range(SLOTS, 0, -1), lengths, strict=True):
        seconds += (length - done) * seconds_per_token(1 / MEAN_TOKENS, in_use)
        done = length
    assert virtual_time.run(on_policy()).seconds == pytest.approx(seconds, rel=0.05)


def sample(*ranges: tuple[int, int, bool]) -> sample_pb2.SampleEnvelope:
    """(policy version, tokens, whether they are masked), one after the other."""
    envelope = sample_pb2.SampleEnvelope()
    for version, tokens, masked in ranges:
        start = envelope.response_tokens
        envelope.response_tokens += tokens
        envelope.policy_ranges.add(policy_version=version, start=start, end=start + tokens, masked=masked)
    return envelope
