"""Estimates from an evaluation's rewards: the mean over samples, pass@k, and an interval around each.

Samples of one prompt are alike, so prompts are the clusters of every interval: sixteen samples of ten prompts are ten
observations, not a hundred and sixty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # type: ignore[import-untyped]

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """`low` and `high` bound the 95 % interval by Student's t; None with fewer than two prompts."""

    value: float
    low: float | None
    high: float | None


def mean_over(prompts: Sequence[Sequence[float]]) -> Estimate:
    """The mean over all values, which are given prompt by prompt.

    Its variance is that of a ratio of sums over clusters (Cochran, Sampling Techniques, 1977, chapter 9):
    G/(G-1) * sum over prompts of (sum of its values - its count * mean)^2 / N^2.
    Where all values are in [0, 1], the interval is too.
    """
    count = sum(map(len, prompts))
    if not count:
        return Estimate(0.0, None, None)
    mean = math.fsum(value for values in prompts for value in values) / count
    residuals = [math.fsum(values) - len(values) * mean for values in prompts if values]
    is_share = all(0.0 <= value <= 1.0 for values in prompts for value in values)
    return _interval(mean, residuals, count, is_share=is_share)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate that at least one of k samples passes, 1 - C(n-c, k) / C(n, k), of Chen et al. 2021.

    Raises ValueError unless 1 <= k <= num_samples and 0 <= num_passed <= num_samples.
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} of {num_passed} passed among {num_samples} samples")
    return 1.0 - math.prod(1.0 - k / count for count in range(num_samples - num_passed + 1, num_samples + 1))


def mean_pass_at_k(prompts: Sequence[Sequence[float]], k: int, pass_reward: float) -> Estimate | None:
    """The mean of pass@k over prompts that have k samples or more; None if no prompt has. A pass has `pass_reward`."""
    estimates = [
        pass_at_k(len(rewards), sum(reward >= pass_reward for reward in rewards), k)
        for rewards in prompts
        if len(rewards) >= k
    ]
    if not estimates:
        return None
    mean = math.fsum(estimates) / len(estimates)
    return _interval(mean, [estimate - mean for estimate in estimates], len(estimates), is_share=True)


def comparable(prompts: Sequence[Sequence[float]], num_samples: int) -> tuple[list[Sequence[float]], list[int]]:
    """The prompts over which every pass@k is taken, and the ks: up to the largest that half of all prompts have.

    Failed samples leave some prompts with fewer than `num_samples`. With other prompts for each k, pass@4 could be
    lower than pass@1.
    """
    for largest in reversed(ks_up_to(num_samples)):
        enough = [rewards for rewards in prompts if len(rewards) >= largest]
        if enough and 2 * len(enough) >= len(prompts):
            return enough, [k for k in ks_up_to(num_samples) if k <= largest]
    return [], []


def ks_up_to(num_samples: int) -> list[int]:
    """1, 2, 4, … and the number of samples itself."""
    return sorted({1 << power for power in range(num_samples.bit_length())} | {num_samples})


def _interval(mean: float, residuals: Sequence[float], count: int, *, is_share: bool) -> Estimate:
    clusters = len(residuals)
    if clusters < 2:
        return Estimate(mean, None, None)
    squares = math.fsum(residual * residual for residual in residuals)
    error = math.sqrt(clusters / (clusters - 1) * squares) / count
    margin = float(stdtrit(clusters - 1, (1 + _CONFIDENCE) / 2)) * error
    low, high = mean - margin, mean + margin
    return Estimate(mean, max(low, 0.0), min(high, 1.0)) if is_share else Estimate(mean, low, high)
