"""The job's rhythm: at which steps weights move, checkpoints are written and evaluations run."""

from __future__ import annotations

from headrace.job.schema.production import EvalSection
from services.trainer.state import TrainState


class JobSchedule:
    """Intervals are counted in rollout steps. The last step always publishes and saves."""

    def __init__(self, num_steps: int, *, publish_every: int, save_every: int | None, evaluation: EvalSection) -> None:
        self.num_steps = num_steps
        self._publish_every = publish_every
        self._save_every = save_every
        self._eval_every = evaluation.eval_interval
        self._has_eval = bool(evaluation.eval_prompt_data)
        self._evaluates_first = not evaluation.skip_eval_before_train

    def publishes(self, state: TrainState) -> bool:
        """True after every update_weights_interval steps, and at the end."""
        return state.step % self._publish_every == 0 or state.step == self.num_steps

    def saves(self, state: TrainState) -> bool:
        """True after every save_interval steps, and at the end."""
        if state.step == self.num_steps:
            return True
        return self._save_every is not None and state.step % self._save_every == 0

    def evaluates(self, step: int) -> bool:
        """True before the first step unless that is skipped, after every eval_interval steps, and at the end."""
        if not self._has_eval:
            return False
        if step == 0:
            return self._evaluates_first
        if step == self.num_steps:
            return True
        return self._eval_every is not None and step % self._eval_every == 0
