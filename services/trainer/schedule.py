"""The job's rhythm: at which steps weights move, checkpoints are written and evaluations run."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.job.eval_sets import EvalSet
from headrace.job.schema.production import EvalSection
from services.trainer.state import TrainState


class JobSchedule:
    """Intervals are counted in rollout steps. The last step always publishes and saves."""

    def __init__(
        self,
        num_steps: int,
        *,
        publish_every: int,
        save_every: int | None,
        evaluation: EvalSection,
        eval_sets: Sequence[EvalSet],
    ) -> None:
        self.num_steps = num_steps
        self._publish_every = publish_every
        self._save_every = save_every
        self._eval_every = {each.name: each.interval or evaluation.eval_interval for each in eval_sets}
        self._evaluates_first = not evaluation.skip_eval_before_train

    def publishes(self, state: TrainState) -> bool:
        """True after every update_weights_interval steps, and at the end."""
        return state.step % self._publish_every == 0 or state.step == self.num_steps

    def saves(self, state: TrainState) -> bool:
        """True after every save_interval steps, and at the end."""
        if state.step == self.num_steps:
            return True
        return self._save_every is not None and state.step % self._save_every == 0

    def evaluates(self, step: int) -> Sequence[str]:
        """Names the data sets that are due at the step.

        All are before the first step, unless that is skipped, and at the end; each is after every interval of steps.
        """
        if step == 0:
            return tuple(self._eval_every) if self._evaluates_first else ()
        if step == self.num_steps:
            return tuple(self._eval_every)
        return tuple(name for name, every in self._eval_every.items() if every is not None and step % every == 0)
