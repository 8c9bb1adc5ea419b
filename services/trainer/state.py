"""The state of a training run."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TrainState:
    """`step` is the rollout step to be trained next; `policy_version` the step whose weights the engines serve."""

    step: int
    policy_version: int
    epoch: int
    """The ledger epoch this trainer owns."""

    def trained(self) -> TrainState:
        """The state after one more step."""
        return replace(self, step=self.step + 1)

    def published(self) -> TrainState:
        """The state after the current weights reached the engines."""
        return replace(self, policy_version=self.step)
