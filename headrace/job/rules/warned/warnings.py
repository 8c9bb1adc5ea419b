"""Settings that are allowed and probably not intended: `headrace check` and `headrace train` warn and continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.job.rules.debug_rules import debug_warnings
from headrace.job.rules.warned.algorithm_warnings import algorithm_warnings
from headrace.job.rules.warned.launch_line_warnings import (
    acts_on_gpus_alone,
    begins_anew,
    evaluates_nothing,
    learns_nothing,
    sequence_parallel_alone,
    slow_bfloat16,
)
from headrace.job.schema.job import Job

WARNINGS: Sequence[Callable[[Job], Sequence[str]]] = (
    sequence_parallel_alone,
    begins_anew,
    evaluates_nothing,
    learns_nothing,
    slow_bfloat16,
    acts_on_gpus_alone,
    algorithm_warnings,
    debug_warnings,
)
"""Each answers sentences that say what will happen and what to set; nothing where all is well."""


def warnings(job: Job) -> list[str]:
    """All warnings for a resolved job."""
    return [sentence for rule in WARNINGS for sentence in rule(job)]
