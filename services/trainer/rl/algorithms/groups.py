"""Rewards of a group as its estimators see them: by group id and rollout, never by position or shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.trajectory import Status
from services.trainer.plan.batch import SampleFacts


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The scored samples of one group that did not fail.

    A rollout that fanned out into several samples counts once in the statistics: each of them weighs 1 / their number.
    """

    by_sample: Mapping[str, float]
    by_rollout: Mapping[str, float]
    rollout_of: Mapping[str, str]
    fan_out: Mapping[str, int]
    """How many samples a rollout has here."""

    @property
    def are_equal(self) -> bool:
        """True when every sample has the same reward: nothing to learn from, and no rounding may say otherwise."""
        return min(self.by_sample.values()) == max(self.by_sample.values())

    @property
    def mean(self) -> float:
        return math.fsum(self.by_rollout.values()) / len(self.by_rollout)

    @property
    def std(self) -> float:
        """The deviation of the samples' rewards from the mean, unbiased in the number of rollouts."""
        mean = self.mean
        squares = math.fsum(self._weight(sample_id) * (r - mean) ** 2 for sample_id, r in self.by_sample.items())
        return math.sqrt(squares / max(len(self.by_rollout) - 1, 1))

    @property
    def least_scale(self) -> float:
        """The least divisor of deviations with which none exceeds √n, n being the number of samples.

        Weights alone do not see to that where rollouts fanned out unevenly.
        """
        mean = self.mean
        largest = max(abs(reward - mean) for reward in self.by_sample.values())
        return largest / math.sqrt(len(self.by_sample))

    def _weight(self, sample_id: str) -> float:
        return 1.0 / self.fan_out[self.rollout_of[sample_id]]


def group_rewards(samples: Iterable[SampleFacts]) -> list[GroupRewards]:
    """One entry for each group, and each role in it, that has a scored sample; failed and unscored ones are in none."""
    groups: dict[tuple[str, str], list[tuple[SampleFacts, float]]] = {}
    for sample in samples:
        if sample.reward is not None and sample.status != Status.FAILED.value:
            groups.setdefault((sample.group_id, sample.role), []).append((sample, sample.reward))
    return [_group(members) for members in groups.values()]


def _group(members: Sequence[tuple[SampleFacts, float]]) -> GroupRewards:
    rollouts: dict[str, list[float]] = {}
    for sample, reward in members:
        rollouts.setdefault(sample.rollout_id, []).append(reward)
    return GroupRewards(
        by_sample={sample.sample_id: reward for sample, reward in members},
        by_rollout={rollout_id: math.fsum(found) / len(found) for rollout_id, found in rollouts.items()},
        rollout_of={sample.sample_id: sample.rollout_id for sample, _ in members},
        fan_out={rollout_id: len(found) for rollout_id, found in rollouts.items()},
    )


def raw_rewards(samples: Iterable[SampleFacts]) -> dict[str, float]:
    """R of every sample; 0 for failed and unscored ones, which are not trained."""
    samples = list(samples)
    rewards = {sample.sample_id: 0.0 for sample in samples}
    for group in group_rewards(samples):
        rewards |= group.by_sample
    return rewards
