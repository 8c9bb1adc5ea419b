"""Counts what producers put into a stream since the buffer started: samples, and why some of them are not trained.

The counts live in memory alone. Trainers compare two readings, so counts from before their start do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from headrace.trajectory import FILTERED, MAX_REWARD, Failure

OTHER = "OTHER"
_MAX_REASONS = 31
_MAX_EXAMPLE_CHARACTERS = 1_024
_MAX_FILTERS_REASON_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The samples that failed or were dropped for one reason, with the latest message and group."""

    num_samples: int
    example: str
    group_id: str


class Production:
    """The counts of one stream."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.num_failed = 0
        self.num_dropped = 0
        self.num_scored = 0
        self.reward_sum = 0.0
        self.num_groups_returned = 0
        self.last_return = ""
        self.lowest_reward: float | None = None
        self.highest_reward: float | None = None
        self._failures: dict[str, FailureCount] = {}
        self._filtered: Counter[tuple[str, float | None]] = Counter()

    @property
    def filtered(self) -> Sequence[tuple[str, float | None, int]]:
        """(what the filter said, the reward that all of a group had, samples), the most frequent first."""
        return [(reason, reward, number) for (reason, reward), number in self._filtered.most_common()]

    @property
    def failures(self) -> Mapping[str, FailureCount]:
        """The counts by reason, the most frequent first."""
        ranked = sorted(self._failures.items(), key=lambda entry: -entry[1].num_samples)
        return MappingProxyType(dict(ranked))

    def completed(self, group_id: str, samples: Iterable[tuple[Failure | None, float | None]]) -> None:
        """Counts a group that was put whole; each of its samples is why it failed, and its reward."""
        for failure, reward in samples:
            self.num_samples += 1
            if reward is not None:
                self._scored(reward)
            if failure is not None:
                self.num_failed += 1
                self._count(group_id, failure, 1)

    def failed(self, group_id: str, failure: Failure, num_samples: int) -> None:
        self.num_samples += num_samples
        self.num_failed += num_samples
        self._count(group_id, failure, num_samples)

    def dropped(self, group_id: str, failure: Failure, num_samples: int, rewards: Iterable[float]) -> None:
        """Counts a group that a producer dropped; `rewards` are of its samples, where they were scored."""
        self.num_samples += num_samples
        self.num_dropped += num_samples
        rewards = list(rewards)
        for reward in rewards:
            self._scored(reward)
        self._count(group_id, failure, num_samples)
        if failure.reason == FILTERED:
            equal = rewards[0] if rewards and min(rewards) == max(rewards) else None
            kind = failure.message[:_MAX_FILTERS_REASON_CHARACTERS], equal
            if kind not in self._filtered and len(self._filtered) >= _MAX_REASONS:
                kind = OTHER, None
            self._filtered[kind] += num_samples

    def returned(self, why: str) -> None:
        """Counts a group that was released unfinished."""
        self.num_groups_returned += 1
        self.last_return = why[:_MAX_EXAMPLE_CHARACTERS]

    def _scored(self, reward: float) -> None:
        if abs(reward) <= MAX_REWARD:  # nor is NaN: one that slips past the edge would spoil the sum for good
            self.num_scored += 1
            self.reward_sum += reward
            self.lowest_reward = reward if self.lowest_reward is None else min(reward, self.lowest_reward)
            self.highest_reward = reward if self.highest_reward is None else max(reward, self.highest_reward)

    def _count(self, group_id: str, failure: Failure, num_samples: int) -> None:
        """Counts by reason. Reasons come from producers, so their number is bounded."""
        reason = failure.reason
        if reason not in self._failures and len(self._failures) >= _MAX_REASONS:
            reason = OTHER
        before = self._failures[reason].num_samples if reason in self._failures else 0
        example = failure.message[:_MAX_EXAMPLE_CHARACTERS]
        self._failures[reason] = FailureCount(before + num_samples, example, group_id)
