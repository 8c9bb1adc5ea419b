"""Sums up a data set's samples as they finish."""

from __future__ import annotations

import math
from collections import defaultdict

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.trajectory import Failure, Sample, Status
from services.rollout.evaluation.estimates import Estimate, comparable, mean_over, mean_pass_at_k


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
                _pass_at_k(k, estimate)
                for k in ks
                if (estimate := mean_pass_at_k(compared, k, self._pass_reward)) is not None
            ],
        )


def _pass_at_k(k: int, estimate: Estimate) -> pb.PassAtK:
    return pb.PassAtK(k=k, estimate=estimate.value, low=estimate.low, high=estimate.high)
