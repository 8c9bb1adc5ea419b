from __future__ import annotations

from headrace.cli.view.run_view import RunView
from headrace.job.schema.job import Job


def view_of(job: Job, resumed_step: int = 0) -> RunView:
    return RunView(job.run, job.rollout.num_rollout, resumed_step)
