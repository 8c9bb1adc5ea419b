"""From token losses to a step's loss: the reference in float64, however samples are split, grouped and fanned out."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.numerics import Reduction, weighted_sum
from tests.support.ledgers.facts import facts

MODES = ("rollout", "token", "constant")
CONSTANT = 7.0


def reduction(samples: Sequence[SampleFacts], mode: str) -> Reduction:
    return Reduction.of(samples, per_token=mode == "token", constant=CONSTANT if mode == "constant" else None)


def step_loss(masks: Tensor, losses: Tensor, parts: Sequence[Sequence[int]], mode: str) -> float:
    samples = [facts(str(i), trained_tokens=int(mask.sum())) for i, mask in enumerate(masks)]
    found = reduction(samples, mode)
    weights = torch.tensor([[found.weight(s.sample_id)] for s in samples]) * masks
    return sum(weighted_sum(losses[rows], weights[rows]).item() for rows in map(list, parts))


@given(st.integers(1, 8), st.sampled_from(MODES), st.randoms(use_true_random=False))
def test_the_loss_of_a_step_is_the_reference_however_it_is_split(n: int, mode: str, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    masks = torch.randint(0, 2, (n, 6), generator=generator)
    masks[0] = 0
    losses = torch.randn(n, 6, generator=generator)
    order = rng.sample(range(n), n)
    size = rng.randint(1, n)
    parts = [order[i : i + size] for i in range(0, n, size)]

    rows = [(m.astype(float), x) for m, x in zip(masks.numpy(), losses.double().numpy(), strict=True)]
    total = sum(m.sum() for m, _ in rows)
    length = {"rollout": lambda m: m.sum(), "token": lambda m: total / n, "constant": lambda m: CONSTANT}[mode]
    expected = sum((m * x).sum() / max(length(m), 1 / n) for m, x in rows) / n
    assert step_loss(masks, losses, parts, mode) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_fully_masked_samples_is_zero(mode: str) -> None:
    losses = torch.full((2, 3), math.inf)
    assert step_loss(torch.zeros(2, 3), losses, [[0], [1]], mode) == 0.0


def test_a_rollout_that_is_masked_in_whole_counts_with_a_loss_of_zero() -> None:
    samples = [facts("a", trained_tokens=4), facts("masked", trained_tokens=0)]
    found = Reduction.of(samples)
    assert (found.num_rollouts, found.num_tokens) == (2, 4)
    assert [found.weight(s.sample_id) for s in samples] == [0.125, 0.0]
    assert Reduction.of(samples, constant=CONSTANT).weight("a") == 1 / CONSTANT / 2
    assert Reduction.of(samples, per_token=True).weight("a") == 0.25


def test_a_rollout_that_fanned_out_weighs_as_much_as_one_that_did_not() -> None:
    """Three samples of one rollout, 2 + 3 + 5 tokens, beside a rollout of 4: each rollout is half of the loss."""
    fanned = [facts(f"f{i}", trained_tokens=n, rollout_id="fanned") for i, n in enumerate((2, 3, 5))]
    found = Reduction.of([*fanned, facts("plain", trained_tokens=4)])
    assert found.num_rollouts == 2
    assert [found.weight(s.sample_id) for s in fanned] == [0.05] * 3
    assert found.weight("plain") == 0.125
    assert sum(found.weight(s.sample_id) * s.trained_tokens for s in fanned) == pytest.approx(0.5)
