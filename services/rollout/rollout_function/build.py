"""Makes the parts of a job that has a rollout function, or a function that evaluates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.client.port import Buffer
from headrace.hooks import HookArgs
from headrace.job.schema.job import Job
from services.rollout.engine.fleet import Fleet
from services.rollout.engine.weights import ServedWeights
from services.rollout.evaluation.eval_function import EvalFunction
from services.rollout.in_flight import groups_at_once
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.ledger import STREAM, BufferLedger
from services.rollout.production.sampling import job_params
from services.rollout.rollout_function.leased_groups import LeasedGroups, ToldLedger
from services.rollout.rollout_function.step_sampler import StepSampler

_ANSWER_SECONDS = 1.0
"""A call for fewer groups than a step's begins when the ledger has had none for so long."""


@dataclass(frozen=True, slots=True)
class StepFunction:
    """The sampler of a producer, and the ledger that it leases from."""

    sampler: StepSampler
    ledger: ToldLedger


def step_function(
    job: Job,
    args: HookArgs,
    fleet: Fleet,
    buffer: Buffer,
    metrics: RolloutMetrics,
    warn: Callable[[str], None],
) -> StepFunction | None:
    """Returns None for a job without a rollout function."""
    path = job.rollout.rollout_function_path
    if path is None:
        return None
    groups_per_step = job.rollout.rollout_batch_size or 1

    async def next_step() -> int:
        stats = await buffer.stats(STREAM)
        return stats.step + stats.groups["READY"] // groups_per_step

    groups = LeasedGroups(groups_at_once(job.rollout))
    sampler = StepSampler(
        path,
        args,
        fleet.weights,
        groups,
        job_params(job.rollout),
        next_step,
        groups_per_step=groups_per_step,
        seconds=job.rollout.rollout_timeout_seconds,
        activity=fleet.activity,
        warn=warn,
        ended=metrics.background_work_ended,
    )
    ledger = BufferLedger(buffer, STREAM, wait_seconds=_ANSWER_SECONDS)
    return StepFunction(sampler, ToldLedger(ledger, groups))


def eval_function(job: Job, args: HookArgs, weights: ServedWeights) -> EvalFunction | None:
    """Returns None where headrace evaluates by itself, as with a rollout function that does not."""
    path, is_own = job.eval.eval_function_path, True
    if path is None:
        path, is_own = job.rollout.rollout_function_path, False
    if path is None:
        return None
    params = job_params(job.rollout)
    return EvalFunction(path, args, weights, params, seconds=job.eval.eval_timeout_seconds, must_evaluate=is_own)
