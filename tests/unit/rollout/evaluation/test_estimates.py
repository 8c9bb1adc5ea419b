"""pass@k and intervals against closed forms and brute force over small cases, in float64."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headrace.trajectory import Failure, Sample, Status
from services.rollout.evaluation.estimates import Tally, ks_up_to, mean_over, mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_all_subsets_of_k_samples_in_which_one_passes(num_samples: int) -> None:
    for num_passed in range(num_samples + 1):
        passes = [1] * num_passed + [0] * (num_samples - num_passed)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(passes, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 1024).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
@settings(deadline=None)
def test_pass_at_k_is_its_closed_form_for_any_number_of_samples(case: tuple[int, int, int]) -> None:
    num_samples, num_passed, k = case
    exact = 1 - Fraction(math.comb(num_samples - num_passed, k), math.comb(num_samples, k))
    assert pass_at_k(num_samples, num_passed, k) == pytest.approx(float(exact), abs=1e-9)


def test_with_one_sample_a_prompt_the_interval_is_that_of_a_plain_mean() -> None:
    values = np.random.default_rng(1).normal(size=20)
    estimate = mean_over([[float(value)] for value in values])
    low, high = stats.t.interval(0.95, 19, loc=values.mean(), scale=stats.sem(values))
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((values.mean(), low, high), abs=1e-12)


def test_with_equal_counts_the_interval_is_that_of_the_prompts_means() -> None:
    values = np.random.default_rng(2).normal(size=(12, 8)) + np.arange(12)[:, None]
    estimate = mean_over([[float(value) for value in row] for row in values])
    means = values.mean(axis=1)
    low, high = stats.t.interval(0.95, 11, loc=means.mean(), scale=stats.sem(means))
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((means.mean(), low, high), abs=1e-12)


def test_repeating_every_sample_makes_an_evaluation_no_surer() -> None:
    once = mean_over([[0.0], [1.0], [1.0], [0.0], [1.0]])
    often = mean_over([[0.0] * 16, [1.0] * 16, [1.0] * 16, [0.0] * 16, [1.0] * 16])
    assert (often.low, often.high) == pytest.approx((once.low, once.high), abs=1e-12)


def test_uneven_counts_are_a_ratio_of_sums() -> None:
    prompts = [[2.0, -1.0, 2.0], [-1.0], [2.0, 2.0]]
    mean = 6 / 6
    residuals = [3 - 3 * mean, -1 - mean, 4 - 2 * mean]
    error = math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 6
    estimate = mean_over(prompts)
    assert estimate.value == pytest.approx(mean, abs=1e-12)
    assert estimate.high == pytest.approx(mean + stats.t.ppf(0.975, 2) * error, abs=1e-12)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """400 evaluations of 30 prompts whose own pass rates differ: 95 % hold the mean of 0.5, within 4 deviations."""
    random = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        rates = random.beta(2, 2, size=30)
        estimate = mean_over([[float(x) for x in random.random(8) < rate] for rate in rates])
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= 0.5 <= estimate.high
    assert abs(held - 380) <= 4 * math.sqrt(400 * 0.95 * 0.05)


def test_one_prompt_has_no_interval_and_none_has_a_mean_of_zero() -> None:
    assert (mean_over([[1.0, 0.0]]).value, mean_over([[1.0, 0.0]]).low) == (0.5, None)
    assert (mean_over([]).value, mean_over([]).high) == (0.0, None)


def test_prompts_with_fewer_than_k_scored_samples_are_left_out_of_pass_at_k() -> None:
    prompts = [[1.0, 0.0, 0.0], [1.0]]
    estimate = mean_pass_at_k(prompts, 2, 1.0)
    assert estimate is not None
    assert (estimate.value, estimate.low) == (pytest.approx(2 / 3), None)
    assert mean_pass_at_k(prompts, 4, 1.0) is None
    half = mean_pass_at_k([[0.5, 0.0], [0.4, 0.4]], 1, 0.5)
    assert half is not None
    assert half.value == 0.25


def test_k_goes_by_powers_of_two_to_the_number_of_samples() -> None:
    assert [ks_up_to(n) for n in (1, 2, 6, 16)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16]]


def tally_of(rewards: dict[int, list[float | None]], n_samples: int) -> Tally:
    """Rewards of each row's samples; None is one that failed."""
    tally = Tally("set", n_samples, pass_reward=1.0)
    for row, found in rewards.items():
        for index, reward in enumerate(found):
            tally.add(row, sample_of(row, index, reward))
    return tally


def sample_of(row: int, index: int, reward: float | None) -> Sample:
    return Sample(
        sample_id=f"{row}-{index}", group_id=f"g{row}", index=index, prompt="", response="",
        tokens=np.arange(3, dtype=np.int32), loss_mask=np.ones(2, np.uint8), rollout_log_probs=np.zeros(2, np.float32),
        status=Status.FAILED if reward is None else Status.COMPLETED, reward=reward,
        failure=Failure("TEST", "it failed") if reward is None else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "rewards",
    [
        {0: [1.0, None, None, None], 1: [0.0, 0.0, 0.0, 0.0]},
        {0: [1.0, 1.0, None, None], 1: [1.0, None, None, None], 2: [0.0, 0.0, 0.0, 1.0]},
        {0: [1.0, 1.0, 1.0, None], 1: [0.0, 0.0, 0.0, 0.0], 2: [1.0, None, None, None]},
    ],
)
def test_a_larger_k_never_passes_less_often_when_samples_fail(rewards: dict[int, list[float | None]]) -> None:
    estimates = [each.estimate for each in tally_of(rewards, 4).result().pass_at_k]
    assert estimates == sorted(estimates)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.9, 1.0, 0.2, 1.0], [1.0, 0.0]])
def test_an_interval_of_shares_is_within_0_and_1(rewards: list[float]) -> None:
    result = tally_of({row: [reward] for row, reward in enumerate(rewards)}, 1).result()
    estimates: list[Any] = [result, *result.pass_at_k]
    for estimate in estimates:
        assert 0.0 <= estimate.low <= estimate.high <= 1.0
