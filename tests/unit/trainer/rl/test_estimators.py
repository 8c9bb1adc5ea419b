"""Advantages against references in float64, written from SPEC.md §5 with numpy and loops, and against closed forms."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.grpo import grpo_rewards
from services.trainer.rl.algorithms.kl import distilled_advantages, token_rewards
from services.trainer.rl.algorithms.numerics import whiten
from services.trainer.rl.algorithms.ppo import gae
from services.trainer.rl.algorithms.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from services.trainer.rl.algorithms.rloo import rloo_rewards
from tests.support.ledgers.facts import facts, group

rewards = st.floats(-10, 10, allow_nan=False).map(lambda r: round(r, 3))
seeds = st.integers(0, 2**31)


@given(st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=4), st.booleans(), st.randoms())
def test_grpo_is_the_reference_for_uneven_groups_in_any_order(
    groups: list[list[float]], divide: bool, shuffler: random.Random
) -> None:
    samples = [s for i, g in enumerate(groups) for s in group(str(i), g)]
    shuffler.shuffle(samples)
    found = grpo_rewards(samples, divide_by_std=divide)
    for i, g in enumerate(groups):
        centered = np.asarray(g) - np.mean(g)
        expected = centered / (np.std(g, ddof=1) + 1e-6) if divide else centered
        np.testing.assert_allclose([found[f"{i}/{j}"] for j in range(len(g))], expected, rtol=1e-7, atol=1e-9)


@given(st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=4), st.randoms())
def test_rloo_leaves_each_answer_out_of_its_own_baseline(groups: list[list[float]], shuffler: random.Random) -> None:
    samples = [s for i, g in enumerate(groups) for s in group(str(i), g)]
    shuffler.shuffle(samples)
    found = rloo_rewards(samples)
    for i, g in enumerate(groups):
        expected = [r - np.mean(g[:j] + g[j + 1 :]) for j, r in enumerate(g)]
        np.testing.assert_allclose([found[f"{i}/{j}"] for j in range(len(g))], expected, rtol=1e-7, atol=1e-9)


@given(st.lists(rewards, min_size=2, max_size=6), st.lists(rewards, min_size=2, max_size=6))
def test_a_role_counts_against_the_same_role_alone(first: list[float], second: list[float]) -> None:
    players = [("first", reward) for reward in first] + [("second", reward) for reward in second]
    samples = [facts(f"{role}/{i}", "g", reward, role=role) for i, (role, reward) in enumerate(players)]
    for estimate in (rloo_rewards, lambda found: grpo_rewards(found, divide_by_std=True)):
        alone = estimate(samples[: len(first)]) | estimate(samples[len(first) :])
        assert estimate(samples) == alone


@given(rewards, st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    samples = group("g", [reward] * size)
    for found in (
        grpo_rewards(samples, divide_by_std=True),
        grpo_rewards(samples, divide_by_std=False),
        rloo_rewards(samples),
    ):
        assert set(found.values()) == {0.0}


def test_failed_and_unjudged_samples_are_outside_the_statistics_and_have_zero() -> None:
    healthy = group("g", [1.0, 2.0, 4.0])
    strangers = [facts("failed", reward=50.0, status="failed"), facts("unscored", reward=None)]
    mixed = [strangers[0], *healthy, strangers[1]]
    zeros = {"failed": 0.0, "unscored": 0.0}
    assert grpo_rewards(mixed, divide_by_std=True) == grpo_rewards(healthy, divide_by_std=True) | zeros
    assert rloo_rewards(mixed) == rloo_rewards(healthy) | zeros


def test_a_rollout_that_fanned_out_counts_once_in_its_groups_statistics() -> None:
    """Rollout x left three samples of reward 1, rollout y one of reward 0: the mean is 1/2, not 3/4."""
    fanned = [facts(f"x{i}", reward=1.0, rollout_id="x") for i in range(3)]
    found = grpo_rewards([*fanned, facts("y", reward=0.0)], divide_by_std=False)
    assert found == {"x0": 0.5, "x1": 0.5, "x2": 0.5, "y": -0.5}
    assert rloo_rewards([*fanned, facts("y", reward=0.0)]) == {"x0": 1.0, "x1": 1.0, "x2": 1.0, "y": -1.0}


@st.composite
def fanned_groups(draw: st.DrawFn) -> list[SampleFacts]:
    """Any sizes, ties, means that are equal but for rounding, and rewards of any magnitude; in any order."""
    magnitude = draw(st.sampled_from([1e-8, 1e-4, 1.0, 1e4, 1e8]))
    reward = st.one_of(
        st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0]), st.floats(-1, 1), st.sampled_from([0.1 + 0.2, 1 + 2**-52])
    )
    rollouts = draw(st.lists(st.lists(reward, min_size=1, max_size=6), min_size=1, max_size=6))
    found = [
        facts(f"{i}/{j}", reward=magnitude * value, rollout_id=str(i))
        for i, fanned in enumerate(rollouts)
        for j, value in enumerate(fanned)
    ]
    return draw(st.permutations(found))


def weighted_reference(samples: list[SampleFacts]) -> dict[str, float]:
    """Mean and deviation of the samples, each weighing 1 / the samples of its rollout, in float64."""
    fan_out = Counter(s.rollout_id for s in samples)
    rewards = np.array([s.reward for s in samples], dtype=np.float64)
    weights = np.array([1 / fan_out[s.rollout_id] for s in samples])
    gaps = rewards - np.average(rewards, weights=weights)
    std = np.sqrt((weights * gaps**2).sum() / max(weights.sum() - 1, 1))
    found = gaps / (std + 1e-6)
    found /= max(1.0, np.abs(found).max() / np.sqrt(len(samples)))
    return dict(zip((s.sample_id for s in samples), found, strict=True))


@given(fanned_groups())
def test_grpo_of_rollouts_that_fanned_out_is_the_weighted_reference(samples: list[SampleFacts]) -> None:
    found, expected = grpo_rewards(samples, divide_by_std=True), weighted_reference(samples)
    # Where rewards differ in their last bits alone, so do the two ways of summing them.
    spread = max(s.reward for s in samples) - min(s.reward for s in samples)  # type: ignore[type-var, operator]
    rounding = 1e-13 * max(abs(s.reward) for s in samples) / (spread + 1e-6)  # type: ignore[arg-type]
    for sample_id, value in expected.items():
        assert found[sample_id] == pytest.approx(0.0 if spread == 0 else value, rel=1e-6, abs=1e-9 + 1e3 * rounding)


def response(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """kl, values, a mask with holes, and a reward."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 12))
    return rng.normal(size=n), rng.normal(size=n), rng.integers(0, 2, n), float(rng.normal())


def reference_rewards(kl: np.ndarray, mask: np.ndarray, reward: float, coef: float) -> np.ndarray:
    found = np.where(mask == 1, -coef * kl, 0.0)
    places = np.flatnonzero(mask)
    if len(places):
        found[places[-1]] += reward
    return found


@given(seeds)
def test_the_terminal_reward_is_on_the_last_trained_token(seed: int) -> None:
    kl, _, mask, reward = response(seed)
    found = token_rewards(reward, torch.tensor(mask), torch.tensor(kl), 0.3)
    np.testing.assert_allclose(found, reference_rewards(kl, mask, reward, 0.3), rtol=1e-5, atol=1e-6)


@given(seeds, st.floats(0.1, 1), st.floats(0, 1))
def test_gae_is_the_definition_over_trained_tokens(seed: int, gamma: float, lambd: float) -> None:
    """A_t = Σ_l (γλ)^l δ_{t+l}, written out as the double sum over the tokens that are trained."""
    kl, values, mask, reward = response(seed)
    token = reference_rewards(kl, mask, reward, 0.1)
    places = np.flatnonzero(mask)
    expected, returns = np.zeros(len(mask)), np.zeros(len(mask))
    for i, t in enumerate(places):
        for offset, k in enumerate(places[i:]):
            follows = values[places[i + offset + 1]] if i + offset + 1 < len(places) else 0.0
            expected[t] += (gamma * lambd) ** offset * (token[k] + gamma * follows - values[k])
        returns[t] = expected[t] + values[t]
    found, found_returns = gae(torch.tensor(token), torch.tensor(values), torch.tensor(mask), gamma=gamma, lambd=lambd)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found_returns, returns, rtol=1e-4, atol=1e-5)


@given(seeds, st.floats(0.1, 1))
def test_reinforce_plus_plus_is_the_discounted_sum_over_trained_tokens(seed: int, gamma: float) -> None:
    kl, _, mask, reward = response(seed)
    token = reference_rewards(kl, mask, reward, 0.2)
    places = np.flatnonzero(mask)
    expected = np.zeros(len(mask))
    for i, t in enumerate(places):
        expected[t] = sum(gamma**j * token[k] for j, k in enumerate(places[i:]))
    found = reinforce_plus_plus(torch.tensor(token), torch.tensor(mask), gamma=gamma)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@given(seeds)
def test_its_baseline_variant_is_the_centered_reward_less_the_kl(seed: int) -> None:
    kl, _, mask, reward = response(seed)
    found = reinforce_plus_plus_baseline(reward, torch.tensor(mask), torch.tensor(kl), 0.2)
    np.testing.assert_allclose(found, np.where(mask == 1, reward - 0.2 * kl, 0.0), rtol=1e-5, atol=1e-6)


def test_a_fully_masked_sample_does_not_crash_any_estimator() -> None:
    mask = torch.zeros(4)
    token = token_rewards(1.0, mask, torch.ones(4), 0.5)
    assert not token.any()
    assert not reinforce_plus_plus(token, mask, gamma=0.9).any()
    assert not reinforce_plus_plus_baseline(1.0, mask, None, 0.0).any()
    assert not torch.stack(gae(token, torch.randn(4), mask, gamma=0.9, lambd=0.9)).any()
    assert not whiten([torch.randn(4)], [mask], None)[0].any()


@given(seeds, st.integers(1, 6))
def test_whitening_is_the_masked_mean_and_bessel_variance(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    values = [5 + 3 * rng.normal(size=int(rng.integers(1, 9))) for _ in range(n)]
    masks = [rng.integers(0, 2, len(v)) for v in values]
    flat = np.concatenate([v[m == 1] for v, m in zip(values, masks, strict=True)])
    variance = np.var(flat, ddof=1) if len(flat) > 1 else 0.0
    mean = flat.mean() if len(flat) else 0.0
    found = whiten([torch.tensor(v) for v in values], [torch.tensor(m) for m in masks], None)
    for result, v, m in zip(found, values, masks, strict=True):
        np.testing.assert_allclose(result, np.where(m == 1, (v - mean) / np.sqrt(variance + 1e-8), 0), 1e-4, 1e-4)


@given(seeds)
def test_distillation_takes_the_reverse_kl_from_the_advantage(seed: int) -> None:
    rng = np.random.default_rng(seed)
    advantages, student, teacher = (rng.normal(size=5) for _ in range(3))
    found = distilled_advantages(torch.tensor(advantages), torch.tensor(student), torch.tensor(teacher), 0.7)
    np.testing.assert_allclose(found, advantages - 0.7 * (student - teacher), rtol=1e-5, atol=1e-6)
