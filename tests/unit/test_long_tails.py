"""The arithmetic of the bench of long responses."""

from __future__ import annotations

import pytest

from headrace.api.sample.v1 import sample_pb2
from tests.bench.long_tails import SIGMAS, SLOTS, Figures, Lengths, Step, seconds_per_token


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
    assert (figures.seconds, figures.length) == (2.5, 80 / 3)
    assert (figures.untrained, figures.stale) == (1 - 50 / 200, 20 / 50)
    assert figures.continued == pytest.approx(1 / 3)


def sample(*ranges: tuple[int, int, bool]) -> sample_pb2.SampleEnvelope:
    """(policy version, tokens, whether they are masked), one after the other."""
    envelope = sample_pb2.SampleEnvelope()
    for version, tokens, masked in ranges:
        start = envelope.response_tokens
        envelope.response_tokens += tokens
        envelope.policy_ranges.add(policy_version=version, start=start, end=start + tokens, masked=masked)
    return envelope
