"""Evaluations: prompts of JSONL files through the engines and the scorer, beside production.

A sample that could not be generated or scored is counted and reported; when more than half of them are, the evaluation
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument, ResourceExhausted
from headrace.rpc.log import log
from headrace.trajectory import Failure, Sample, Status
from headrace.wire.checks import optional_name, require_at_most, require_between, require_name, require_path
from headrace.wire.limits import MAX_EVAL_DATASETS, MAX_EVAL_SAMPLES, MAX_EVALUATIONS, MAX_SAMPLES_PER_GROUP
from services.rollout.engine.api import SamplingParams
from services.rollout.eval_file import EvalFiles, EvalKeys, EvalRow
from services.rollout.evaluation_slots import EvaluationSlots
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import Sampler, SampleRequest, failed_sample, merged_params, seed_of
from services.rollout.scoring import SampleScorer

SAMPLES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Progress:
    """Samples finished since the one before; `results` on the last only."""

    done: int
    total: int
    samples: tuple[Sample, ...] = ()
    results: tuple[pb.EvalResult, ...] = ()


@dataclass(slots=True)
class _Tally:
    """Sums up a data set's samples."""

    rewards: list[float] = field(default_factory=list)
    failed: int = 0
    first_failure: Failure | None = None
    response_tokens: int = 0
    truncated: int = 0
    versions: set[int] = field(default_factory=set)

    def add(self, sample: Sample) -> None:
        if sample.status is Status.FAILED or sample.reward is None:
            self.failed += 1
            self.first_failure = self.first_failure or sample.failure
            return
        self.rewards.append(sample.reward)
        self.response_tokens += sample.response_length
        self.truncated += sample.status is Status.TRUNCATED
        self.versions.update(r.policy_version for r in sample.policy_ranges)

    def result(self, name: str) -> pb.EvalResult:
        count = max(len(self.rewards), 1)
        return pb.EvalResult(
            name=name,
            mean_reward=math.fsum(self.rewards) / count,
            num_samples=len(self.rewards),
            num_failed=self.failed,
            mean_response_tokens=self.response_tokens / count,
            truncated_ratio=self.truncated / count,
            min_policy_version=min(self.versions, default=0),
            max_policy_version=max(self.versions, default=0),
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """One data set: its rows, and how each is sampled."""

    name: str
    rows: Sequence[EvalRow]
    n_samples: int
    params: SamplingParams

    @property
    def total(self) -> int:
        return len(self.rows) * self.n_samples


@dataclass(frozen=True, slots=True)
class _Job:
    """One sample to be generated and scored."""

    tally: _Tally
    plan: _Plan
    row: int
    index: int


class Evaluator:
    """Evaluates whichever version the engines serve. At most 64 samples of one evaluation are in flight."""

    def __init__(
        self,
        encoder: PromptEncoder,
        sampler: Sampler,
        scorer: SampleScorer,
        defaults: SamplingParams,
        *,
        seed: int,
        files: EvalFiles,
        slots: EvaluationSlots,
    ) -> None:
        self._encoder = encoder
        self._sampler = sampler
        self._scorer = scorer
        self._defaults = defaults
        self._seed = seed
        self._files = files
        self._slots = slots
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
        plans = [await self._plan(dataset) for dataset in datasets]
        total = sum(plan.total for plan in plans)
        if total > MAX_EVAL_SAMPLES:
            raise InvalidArgument(
                f"{total} samples, an evaluation may have {MAX_EVAL_SAMPLES}: pass max_prompts", field="datasets"
            )
        tallies = [_Tally() for _ in plans]
        done = 0
        async with contextlib.aclosing(self._finished(_jobs(plans, tallies))) as finished:
            async for job, samples in finished:
                for sample in samples:
                    job.tally.add(sample)
                done += 1
                _require_most(tallies, total)
                yield Progress(done, total, tuple(samples))
        yield Progress(done, total, results=tuple(t.result(p.name) for p, t in zip(plans, tallies, strict=True)))

    async def _plan(self, dataset: pb.EvalDataset) -> _Plan:
        name = require_name(dataset.name, "datasets.name")
        n_samples = require_between(
            dataset.n_samples_per_prompt, 1, MAX_SAMPLES_PER_GROUP, "datasets.n_samples_per_prompt"
        )
        keys = EvalKeys(
            require_name(dataset.input_key, "datasets.input_key"),
            optional_name(dataset.label_key, "datasets.label_key"),
            optional_name(dataset.metadata_key, "datasets.metadata_key"),
        )
        path = require_path(dataset.path, "datasets.path")
        params = merged_params(dataset.sampling, self._defaults)
        limit = dataset.max_prompts if dataset.HasField("max_prompts") else None
        return _Plan(name, await self._encoder.off_loop(self._files.read, path, keys, limit), n_samples, params)

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
        row = job.plan.rows[job.row]
        group_id = f"eval/{job.plan.name}/{job.row}"
        request = SampleRequest(
            sample_id=f"eval-{evaluation_id}/{job.plan.name}/{job.row}/{job.index}",
            group_id=group_id,
            index=job.index,
            prompt=EncodedPrompt("", ()),
            label=row.label,
            metadata=row.metadata,
            params=replace(job.plan.params, seed=seed_of(self._seed, group_id, 0, job.index)),
        )
        try:
            request = replace(request, prompt=await self._encoder.off_loop(self._encoded, row))
            async with self._slots.slot():
                samples = await self._sampler.sample_all([request], evaluation=True)
            return job, await self._scorer.score(samples)
        except Exception as error:  # noqa: BLE001  # one sample of many
            reason = error.reason if isinstance(error, HeadraceError) else "EVALUATION_RAISED"
            log.warning("evaluation_sample_failed", where=row.where, reason=reason, error=str(error))
            return job, [failed_sample(request, Failure(reason, f"{row.where}: {error}"))]

    def _encoded(self, row: EvalRow) -> EncodedPrompt:
        if isinstance(row.prompt, str):
            return self._encoder.encode_text(row.prompt)
        return self._encoder.encode_messages(row.prompt, None)


def _jobs(plans: Sequence[_Plan], tallies: Sequence[_Tally]) -> Iterator[_Job]:
    for plan, tally in zip(plans, tallies, strict=True):
        for row in range(len(plan.rows)):
            for index in range(plan.n_samples):
                yield _Job(tally, plan, row, index)


def _require_most(tallies: Sequence[_Tally], total: int) -> None:
    failed = sum(tally.failed for tally in tallies)
    if 2 * failed > total:
        first = next(tally.first_failure for tally in tallies if tally.first_failure)
        raise FailedPrecondition(
            f"{failed} of {total} samples failed, the first by {first.reason}: {first.message}",
            reason="EVALUATION_FAILED",
        )
