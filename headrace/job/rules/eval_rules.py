"""Rules for evaluations."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.schema.job import Job


def check_evaluations(job: Job) -> None:
    """Raises ConfigError for the first rule that a job's evaluations break."""
    _best_by_one_version(job)


def _best_by_one_version(job: Job) -> None:
    metric = job.checkpoint.keep_best_metric
    if job.checkpoint.keep_best and metric.startswith("eval") and not job.eval.eval_exact_version:
        raise ConfigError(
            f"keep_best_metric {metric} cannot tell which checkpoint is best: training goes on beside evaluations, so "
            "that later versions answer too. Let it wait for them with --eval-exact-version, or choose by reward/mean",
            field="keep_best_metric",
        )
