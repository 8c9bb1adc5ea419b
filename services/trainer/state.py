"""The state of a training run, the engines that lack its weights, and the steps at which something is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class TrainState:
    """`step` is the rollout step to be trained next; `policy_version` the step whose weights the engines serve."""

    step: int
    policy_version: int
    epoch: int
    """The ledger epoch this trainer owns."""

    def trained(self) -> TrainState:
        return replace(self, step=self.step + 1)

    def published(self) -> TrainState:
        return replace(self, policy_version=self.step)


@dataclass(slots=True)
class JobSchedule:
    """Intervals are counted in rollout steps. The last step always publishes and saves."""

    num_steps: int
    publish_every: int
    save_every: int | None
    eval_every: Mapping[str, int | None]
    """By data set; None: before the first step and at the end alone"""
    evaluates_first: bool

    def publishes(self, state: TrainState) -> bool:
        """True after every update_weights_interval steps, and at the end."""
        return state.step % self.publish_every == 0 or state.step == self.num_steps

    def saves(self, state: TrainState) -> bool:
        """True after every save_interval steps, and at the end."""
        if state.step == self.num_steps:
            return True
        return self.save_every is not None and state.step % self.save_every == 0

    def evaluates(self, step: int) -> Sequence[str]:
        """Names the data sets that are due at the step.

        All are before the first step, unless that is skipped, and at the end; each is after every interval of steps.
        """
        if step == 0:
            return tuple(self.eval_every) if self.evaluates_first else ()
        if step == self.num_steps:
            return tuple(self.eval_every)
        return tuple(name for name, every in self.eval_every.items() if every is not None and step % every == 0)


EngineIds = Mapping[int, Sequence[str]]
"""Engines by the number of their rollout service; none: all of that service's."""


@dataclass(frozen=True, slots=True)
class StaleEngines:
    """Either all fleets serve another version, or some engines came back without the served one, or nobody."""

    all: bool = False
    engine_ids: EngineIds = field(default_factory=dict)


ALL_STALE = StaleEngines(all=True)
NONE_STALE = StaleEngines()
