"""The samples that are generated at once, for training and for evaluations beside it."""

from __future__ import annotations

from headrace.job.schema.job import Job
from services.rollout.evaluation.evaluate import SAMPLES_AT_ONCE

_EVALUATION_SHARE = 8
"""Training has so many samples in flight for each sample of an evaluation."""


def evaluated_beside_training(job: Job) -> int:
    """Evaluation's samples in flight beside training's, which does not go first where it waits for the evaluation."""
    if job.eval.eval_samples_in_flight is not None:
        return job.eval.eval_samples_in_flight
    if job.eval.eval_exact_version:
        return SAMPLES_AT_ONCE
    return max(1, samples_at_once(job) // _EVALUATION_SHARE)


def groups_at_once(job: Job) -> int:
    """Returns the most groups that a producer works on."""
    groups_per_step = job.rollout.over_sampling_batch_size or job.rollout.rollout_batch_size or 1
    return job.rollout.max_groups_in_flight or 2 * groups_per_step


def samples_at_once(job: Job) -> int:
    """Returns the number of their samples."""
    return groups_at_once(job) * (job.rollout.n_samples_per_prompt or 1)
