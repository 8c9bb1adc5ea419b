"""Rules for runs of generation alone and of training alone."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.schema.job import Job


def check_debug(job: Job) -> None:
    """Raises ConfigError for parts that contradict each other or lack what they need."""
    debug = job.debug
    if debug.debug_train_only and not debug.trains_alone:
        raise ConfigError(
            "debug_train_only has nothing to train on: name the steps of an earlier run, kept with "
            "--save-debug-rollout-data, with --load-debug-rollout-data",
            field="debug_train_only",
        )
    if debug.debug_rollout_only and debug.trains_alone:
        raise ConfigError(
            "debug_rollout_only generates and load_debug_rollout_data trains on what was generated: leave one out",
            field="debug_rollout_only",
        )
    if debug.save_debug_rollout_data is not None and debug.trains_alone:
        raise ConfigError(
            "save_debug_rollout_data would keep again what load_debug_rollout_data reads: leave it out",
            field="save_debug_rollout_data",
        )


def debug_warnings(job: Job) -> list[str]:
    """Says which part of the job is left out."""
    if job.debug.trains_alone and job.eval.is_asked_for:
        return ["nothing is evaluated: load_debug_rollout_data trains without engines"]
    if job.debug.debug_rollout_only and job.checkpoint.save_hf is not None:
        return ["nothing is exported to save_hf: debug_rollout_only trains nothing"]
    return []
