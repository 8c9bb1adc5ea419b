"""Sums up a data set's samples: the mean over their rewards, pass@k, and an interval around each.

Samples of one prompt are alike, so prompts are the clusters of every interval: sixteen samples of ten prompts are ten
observations, not a hundred and sixty.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # type: ignore[import-untyped]

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.trajectory import Failure, Sample, Status

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


class Tally:
    """Failed samples are counted and in no mean. Samples into which one fanned out count as one: their mean."""

    def __init__(self, name: str, n_samples: int, pass_reward: float) -> None:
        self._name = name
        self._n_samples = n_samples
        self._pass_reward = pass_reward
        self._rewards: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        """Rewards of each row and each of its samples."""
        self._num_scored = 0
        self._response_tokens = 0
        self._truncated = 0
        self._versions: set[int] = set()
        self.num_failed = 0
        self.first_failure: Failure | None = None

    def add(self, row: int, sample: Sample) -> None:
        """Counts one finished sample of a row."""
        if sample.status is Status.FAILED or sample.reward is None:
            self.num_failed += 1
            self.first_failure = self.first_failure or sample.failure
            return
        self._rewards[row][sample.index].append(sample.reward)
        self._num_scored += 1
        self._response_tokens += sample.response_length
        self._truncated += sample.status is Status.TRUNCATED
        self._versions.update(r.policy_version for r in sample.policy_ranges)

    def result(self) -> pb.EvalResult:
        """Returns the figures of all samples so far."""
        count = max(self._num_scored, 1)
        prompts = [[math.fsum(fan) / len(fan) for fan in row.values()] for row in self._rewards.values()]
        mean = mean_over(prompts)
        compared, ks = comparable(prompts, self._n_samples)
        return pb.EvalResult(
            name=self._name,
            mean_reward=mean.value,
            low=mean.low,
            high=mean.high,
            num_prompts=len(prompts),
            num_samples=self._num_scored,
            num_failed=self.num_failed,
            mean_response_tokens=self._response_tokens / count,
            truncated_ratio=self._truncated / count,
            min_policy_version=min(self._versions, default=0),
            max_policy_version=max(self._versions, default=0),
            pass_at_k=[
                pb.PassAtK(k=k, estimate=estimate.value, low=estimate.low, high=estimate.high)
                for k in ks
                if (estimate := mean_pass_at_k(compared, k, self._pass_reward)) is not None
            ],
        )
