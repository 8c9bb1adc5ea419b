"""Exceptions by which a sampler ends a group without samples to train."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.trajectory import Sample


class GivenBack(Exception):
    """The group is leased again later: with --partial-rollout from the tokens of `samples`."""

    def __init__(self, reason: str, samples: Sequence[Sample] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.samples = samples


class GivenUp(Exception):
    """The group is dropped, and another prompt takes its place in the batch."""

    def __init__(self, reason: str, rewards: Sequence[float] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.rewards = rewards
