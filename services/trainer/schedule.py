"""The job's rhythm: at which steps weights move, checkpoints are written and evaluations run."""

from __future__ import annotations

from headrace.job.schema.job import Job
from services.trainer.state import TrainState


class JobSchedule:
    """Reads the job's intervals; the last step always publishes."""

    def __init__(self, job: Job) -> None:
        self.num_steps = job.rollout.num_rollout
        self._publish_every = job.publish.update_weights_interval
        self._save_every = job.checkpoint.save_interval
        self._eval_every = job.eval.eval_interval
        self._has_eval = bool(job.eval.eval_prompt_data)
        self._evaluates_first = not job.eval.skip_eval_before_train

    def publishes(self, state: TrainState) -> bool:
        """After every update_weights_interval steps, and at the end."""
        return state.step % self._publish_every == 0 or state.step == self.num_steps

    def saves(self, state: TrainState) -> bool:
        """After every save_interval steps, and at the end."""
        if state.step == self.num_steps:
            return True
        return self._save_every is not None and state.step % self._save_every == 0

    def evaluates(self, state: TrainState) -> bool:
        """Before the first step unless that is skipped, after every eval_interval steps, and at the end."""
        if not self._has_eval:
            return False
        if state.step == 0:
            return self._evaluates_first
        if state.step == self.num_steps:
            return True
        return self._eval_every is not None and state.step % self._eval_every == 0
