"""Evaluations: prompts of JSONL files through the engines and the scorer, beside production.

A sample that could not be generated or scored is counted and reported; when more than half of them are, the evaluation
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument, ResourceExhausted
from headrace.limits import MAX_EVAL_DATASETS, MAX_EVAL_SAMPLES, MAX_EVALUATIONS, require_at_most
from headrace.rpc.log import log
from headrace.trajectory import Failure, Sample, Status
from services.rollout.admission import EngineSlots, Kind
from services.rollout.engine.api import SamplingParams
from services.rollout.evaluation.dataset import EvalFiles, EvalPlan, read_plan
from services.rollout.evaluation.estimates import Tally
from services.rollout.evaluation.function import EvalFunction
from services.rollout.production.prompts import NOT_ENCODED, PromptEncoder
from services.rollout.production.sampling import Sampler, SampleRequest, failed_sample, seed_of
from services.rollout.scoring import SampleScorer

SAMPLES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Progress:
    """Samples finished since the one before; `results` on the last only."""

    done: int
    total: int
    samples: tuple[Sample, ...] = ()
    results: tuple[pb.EvalResult, ...] = ()


@dataclass(frozen=True, slots=True)
class _Job:
    """Samples of one row to be generated and scored together."""

    tally: Tally
    plan: EvalPlan
    row: int
    indexes: range


class EvalRunner:
    """Evaluates whichever version the engines serve. At most 64 samples of one evaluation are in flight.

    `scores_groups` says that the reward compares a prompt's samples, so that they are scored in one call. A `function`
    takes the place of all of it.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        sampler: Sampler,
        scorer: SampleScorer,
        defaults: SamplingParams,
        *,
        seed: int,
        files: EvalFiles,
        slots: EngineSlots,
        scores_groups: bool = False,
        function: EvalFunction | None = None,
    ) -> None:
        self._encoder = encoder
        self._sampler = sampler
        self._scorer = scorer
        self._defaults = defaults
        self._seed = seed
        self._files = files
        self._slots = slots
        self._scores_groups = scores_groups
        self._function = function
        self._running = 0

    async def run(self, datasets: Sequence[pb.EvalDataset]) -> AsyncGenerator[Progress, None]:
        """Progress as samples finish, then the results.

        Raises InvalidArgument with file and line for bad data, FailedPrecondition when most samples failed, and
        ResourceExhausted while too many evaluations run.
        """
        if self._running >= MAX_EVALUATIONS:
            raise ResourceExhausted(
                f"{self._running} evaluations run, which is the limit: try again when one has ended",
                retry_after_seconds=10.0,
            )
        self._running += 1
        try:
            async with contextlib.aclosing(self._run(datasets)) as all_progress:
                async for progress in all_progress:
                    yield progress
        finally:
            self._running -= 1

    async def _run(self, datasets: Sequence[pb.EvalDataset]) -> AsyncGenerator[Progress, None]:
        if not datasets:
            raise InvalidArgument("no data set is named", field="datasets")
        require_at_most(len(datasets), MAX_EVAL_DATASETS, "datasets")
        plans = [await self._encoder.off_loop(read_plan, dataset, self._files, self._defaults) for dataset in datasets]
        if self._function and self._function.evaluates:
            for progress in _progress(*await self._function.evaluate(plans)):
                yield progress
            return
        total = sum(plan.total for plan in plans)
        if total > MAX_EVAL_SAMPLES:
            raise InvalidArgument(
                f"{total} samples, an evaluation may have {MAX_EVAL_SAMPLES}: pass max_prompts", field="datasets"
            )
        tallies = [Tally(plan.dataset.name, plan.n_samples, plan.pass_reward) for plan in plans]
        done = 0
        async with contextlib.aclosing(self._finished(_jobs(plans, tallies, at_once=self._scores_groups))) as finished:
            async for job, samples in finished:
                for sample in samples:
                    job.tally.add(job.row, sample)
                done += len(job.indexes)
                _require_most(tallies, total)
                yield Progress(done, total, tuple(samples))
        yield Progress(done, total, results=tuple(tally.result() for tally in tallies))

    async def _finished(self, jobs: Iterator[_Job]) -> AsyncGenerator[tuple[_Job, list[Sample]], None]:
        """Yields each job with its samples as they finish; another starts whenever one has ended."""
        running: set[asyncio.Task[tuple[_Job, list[Sample]]]] = set()
        evaluation_id = uuid.uuid4().hex[:8]
        try:
            while True:
                while len(running) < SAMPLES_AT_ONCE and (job := next(jobs, None)) is not None:
                    running.add(asyncio.create_task(self._done(job, evaluation_id)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()

    async def _done(self, job: _Job, evaluation_id: str) -> tuple[_Job, list[Sample]]:
        """Turns what goes wrong with a sample into that sample's failure."""
        plan, group_id = job.plan, f"eval/{job.plan.dataset.name}/{job.row}"
        requests = [
            SampleRequest.of(
                plan.rows[job.row],
                NOT_ENCODED,
                replace(plan.params, seed=seed_of(self._seed, group_id, 0, index)),
                sample_id=f"eval-{evaluation_id}/{plan.dataset.name}/{job.row}/{index}",
                group_id=group_id,
                index=index,
            )
            for index in job.indexes
        ]
        generated = await asyncio.gather(*(self._generated(job, request) for request in requests))
        samples = [sample for samples in generated for sample in samples]
        try:
            scored = await self._scorer.score(samples, evaluation=True)
            return job, [_by_key(plan.dataset.reward_key, sample) for sample in scored]
        except Exception as error:  # noqa: BLE001  # one row of many
            return job, [_failed(request, job, error) for request in requests]

    async def _generated(self, job: _Job, request: SampleRequest) -> list[Sample]:
        plan = job.plan
        try:
            prompt, params = await self._encoder.off_loop(plan.encode, self._encoder, plan.rows[job.row])
            request = replace(request, prompt=prompt, params=replace(params, seed=request.params.seed))
            async with self._slots.slot(Kind.EVALUATION):
                return await self._sampler.sample_all([request], evaluation=True)
        except Exception as error:  # noqa: BLE001  # one sample of many
            return [_failed(request, job, error)]


def _jobs(plans: Sequence[EvalPlan], tallies: Sequence[Tally], *, at_once: bool) -> Iterator[_Job]:
    for plan, tally in zip(plans, tallies, strict=True):
        for row in range(len(plan.rows)):
            if at_once:
                yield _Job(tally, plan, row, range(plan.n_samples))
            else:
                yield from (_Job(tally, plan, row, range(index, index + 1)) for index in range(plan.n_samples))


def _by_key(key: str, sample: Sample) -> Sample:
    """The sample with the part of its reward that counts. One without that part fails: it is no reward of 0."""
    if not key or sample.status is Status.FAILED:
        return sample
    if key not in sample.reward_parts:
        parts = ", ".join(sample.reward_parts) or "none: it is one number"
        failure = Failure("REWARD_WITHOUT_KEY", f"the reward has no part {key}; its parts are {parts}")
        return replace(sample, reward=None, status=Status.FAILED, failure=failure)
    return replace(sample, reward=sample.reward_parts[key])


def _failed(request: SampleRequest, job: _Job, error: Exception) -> Sample:
    reason = error.reason if isinstance(error, HeadraceError) else "EVALUATION_RAISED"
    where = job.plan.rows[job.row].prompt_id
    log.warning("evaluation_sample_failed", where=where, reason=reason, error=str(error))
    return failed_sample(request, Failure(reason, f"{where}: {error}"))


def _progress(samples: Sequence[Sample], tallies: Sequence[Tally]) -> Iterator[Progress]:
    """All samples at once may be more than a message holds."""
    total = len(samples)
    _require_most(tallies, total)
    for start in range(0, total, SAMPLES_AT_ONCE):
        some = tuple(samples[start : start + SAMPLES_AT_ONCE])
        yield Progress(start + len(some), total, some)
    yield Progress(total, total, results=tuple(tally.result() for tally in tallies))


def _require_most(tallies: Sequence[Tally], total: int) -> None:
    failed = sum(tally.num_failed for tally in tallies)
    if 2 * failed > total:
        first = next(tally.first_failure for tally in tallies if tally.first_failure)
        raise FailedPrecondition(
            f"{failed} of {total} samples failed, the first by {first.reason}: {first.message}",
            reason="EVALUATION_FAILED",
        )
