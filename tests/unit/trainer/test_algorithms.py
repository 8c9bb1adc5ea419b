"""The formulas against references in float64, written from the papers with numpy and loops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.algorithms.advantages import grpo_advantages
from services.trainer.algorithms.kl import KlType, kl_estimate
from services.trainer.algorithms.policy_loss import policy_loss
from services.trainer.algorithms.reduction import Reduction, weighted_sum
from services.trainer.algorithms.sft import sft_loss
from services.trainer.algorithms.tis import importance_weights
from services.trainer.batch import SampleFacts

rewards = st.floats(-10, 10, allow_nan=False).map(lambda r: round(r, 3))
log_ratios = st.floats(-3, 3, allow_nan=False)


def facts(
    sample_id: str, group_id: str = "g", reward: float | None = 0.0, status: str = "completed", trained_tokens: int = 1
) -> SampleFacts:
    return SampleFacts(sample_id, group_id, reward, status, 3, max(trained_tokens, 1), trained_tokens, 0)


def group(group_id: str, group_rewards: Sequence[float | None]) -> list[SampleFacts]:
    return [facts(f"{group_id}/{i}", group_id, reward) for i, reward in enumerate(group_rewards)]


def grpo(samples: Sequence[SampleFacts]) -> dict[str, float]:
    return grpo_advantages(samples, normalize_rewards=True, divide_by_std=True)


@given(st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=4), st.booleans(), st.randoms())
def test_advantages_are_the_reference_for_uneven_groups_in_any_order(
    groups: list[list[float]], divide: bool, shuffler: random.Random
) -> None:
    samples = [s for i, g in enumerate(groups) for s in group(str(i), g)]
    shuffler.shuffle(samples)
    found = grpo_advantages(samples, normalize_rewards=True, divide_by_std=divide)
    for i, g in enumerate(groups):
        centered = np.asarray(g) - np.mean(g)
        expected = centered / (np.std(g, ddof=1) + 1e-6) if divide else centered
        np.testing.assert_allclose([found[f"{i}/{j}"] for j in range(len(g))], expected, rtol=1e-7, atol=1e-9)


@given(rewards, st.integers(1, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, size: int, divide: bool) -> None:
    found = grpo_advantages(group("g", [reward] * size), normalize_rewards=True, divide_by_std=divide)
    assert set(found.values()) == {0.0}


def test_failed_and_unjudged_samples_are_outside_the_statistics_and_have_advantage_zero() -> None:
    healthy = group("g", [1.0, 2.0, 4.0])
    strangers = [facts("failed", reward=50.0, status="failed"), facts("unjudged", reward=None)]
    assert grpo([strangers[0], *healthy, strangers[1]]) == grpo(healthy) | {"failed": 0.0, "unjudged": 0.0}


def test_a_lone_judged_sample_has_advantage_zero_and_its_reward_when_rewards_are_raw() -> None:
    samples = [facts("a", reward=3.0), facts("b", reward=None)]
    assert grpo(samples) == {"a": 0.0, "b": 0.0}
    assert grpo_advantages(samples, normalize_rewards=False, divide_by_std=True) == {"a": 3.0, "b": 0.0}


def loss_reference(lr: float, advantage: float, low: float, high: float, c: float | None) -> float:
    r = math.exp(lr)
    loss = max(-r * advantage, -min(max(r, 1 - low), 1 + high) * advantage)
    return min(loss, -c * advantage) if c is not None and advantage < 0 else loss


@given(log_ratios, st.floats(-3, 3, allow_nan=False), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_is_the_reference(lr: float, advantage: float, c: float | None) -> None:
    old = -1.25
    loss, _ = policy_loss(torch.tensor([[old + lr]]), torch.tensor([[old]]), torch.tensor([[advantage]]), 0.2, 0.3, c)
    expected = loss_reference(lr, advantage, 0.2, 0.3, c)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.0, 1, 0), (1.25, 1, 0), (1.35, 1, 1), (0.5, 1, 0), (0.9, -1, 0), (0.7, -1, 1), (1.9, -1, 0), (2.1, -1, 1)],
)
def test_the_indicator_says_where_a_clip_binds_and_the_gradient_is_gone(
    ratio: float, advantage: float, clipped: float
) -> None:
    log_probs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, indicator = policy_loss(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2, 0.3, 2.0)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert indicator.item() == clipped
    assert log_probs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-5)


@given(log_ratios, st.sampled_from([-2.0, -0.5, 0.5, 2.0]), st.sampled_from([None, 3.0]))
def test_policy_loss_has_the_gradient_of_finite_differences(lr: float, advantage: float, c: float | None) -> None:
    kinks = [math.log(k) for k in (0.8, 1.3, 3.0)]
    if min(abs(lr - k) for k in kinks) < 1e-3:
        return
    log_probs = torch.tensor([[lr]], requires_grad=True)
    policy_loss(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2, 0.3, c)[0].sum().backward()
    h = 1e-5
    slope = (loss_reference(lr + h, advantage, 0.2, 0.3, c) - loss_reference(lr - h, advantage, 0.2, 0.3, c)) / (2 * h)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(slope, rel=1e-4, abs=1e-5)


KL: dict[KlType, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "low_var_kl": lambda d: min(max(math.exp(-d) - 1 + d, -10), 10),
}


@given(st.floats(-8, 15, allow_nan=False), st.sampled_from(sorted(KL)))
def test_kl_is_the_reference(d: float, kl_type: KlType) -> None:
    found = kl_estimate(torch.tensor([d]), torch.tensor([0.0]), kl_type)
    assert found.item() == pytest.approx(KL[kl_type](d), rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("d", [-1000.0, -50.0, 50.0])
def test_low_var_kl_has_a_finite_gradient_however_far_the_policies_are(d: float) -> None:
    log_probs = torch.tensor([d], requires_grad=True)
    found = kl_estimate(log_probs, torch.zeros(1), "low_var_kl")
    found.sum().backward()
    assert found.item() == 10.0
    assert log_probs.grad is not None
    assert log_probs.grad.item() == 0.0


@given(st.lists(log_ratios, min_size=1, max_size=5), st.floats(0, 0.9), st.floats(1.1, 4))
def test_importance_weights_are_truncated_ratios_without_gradient(gaps: list[float], low: float, high: float) -> None:
    old = torch.tensor([gaps], requires_grad=True)
    found = importance_weights(old, torch.zeros(1, len(gaps)), low, high)
    ratio = np.exp(np.asarray(gaps))
    assert not found.weights.requires_grad
    np.testing.assert_allclose(found.weights[0], np.clip(ratio, low, high), rtol=1e-5)
    np.testing.assert_allclose(found.log_prob_gap[0], np.abs(gaps), rtol=1e-5, atol=1e-7)
    near = np.isclose(ratio, low, rtol=1e-5) | np.isclose(ratio, high, rtol=1e-5)
    assert (near | (found.truncated[0].numpy() == ((ratio < low) | (ratio > high)))).all()


def test_sft_loss_is_the_negative_log_likelihood() -> None:
    assert sft_loss(torch.tensor([[-0.5, -2.0]])).tolist() == [[0.5, 2.0]]


def step_loss(masks: Tensor, losses: Tensor, parts: Sequence[Sequence[int]], per_token: bool) -> float:
    lengths = masks.sum(1)
    reduction = Reduction.of([facts(str(i), trained_tokens=int(n)) for i, n in enumerate(lengths)], per_token=per_token)
    return sum(
        weighted_sum(losses[rows], reduction.weights(masks[rows], lengths[rows])).item() for rows in map(list, parts)
    )


def total_tokens(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    return float(sum(mask.sum() for mask, _ in rows))


@settings(deadline=None)
@given(st.integers(1, 8), st.booleans(), st.randoms(use_true_random=False))
def test_the_loss_of_a_step_is_the_reference_however_it_is_split(n: int, per_token: bool, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    masks = torch.randint(0, 2, (n, 6), generator=generator)
    masks[0] = 0
    losses = torch.randn(n, 6, generator=generator)
    order = rng.sample(range(n), n)
    size = rng.randint(1, n)
    parts = [order[i : i + size] for i in range(0, n, size)]

    rows = [(m.astype(float), x) for m, x in zip(masks.numpy(), losses.double().numpy(), strict=True) if m.any()]
    per_rollout = [(m * x).sum() / (total_tokens(rows) / len(rows) if per_token else m.sum()) for m, x in rows]
    expected = sum(per_rollout) / max(len(rows), 1)
    assert step_loss(masks, losses, parts, per_token) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_fully_masked_samples_weigh_zero_and_a_step_of_them_is_zero(per_token: bool) -> None:
    losses = torch.full((2, 3), math.inf)
    assert step_loss(torch.zeros(2, 3), losses, [[0], [1]], per_token) == 0.0


def test_failed_samples_are_not_counted_as_rollouts() -> None:
    samples = [
        facts("a", trained_tokens=4),
        facts("b", status="failed", trained_tokens=9),
        facts("c", trained_tokens=0),
    ]
    assert Reduction.of(samples, per_token=False) == Reduction(num_rollouts=1, num_tokens=4, per_token=False)
