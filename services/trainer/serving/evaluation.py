"""Evaluations beside training: one at a time, each with a row of metrics when it ends.

States: idle → running → idle. One that is due while another runs waits for it; a newer one takes its place, and a row
says so. Nothing is durable but the rows: what a stop or a kill cuts off has none with a result, so that a resumed run
evaluates again. The rollout service runs an evaluation, on whatever versions the engines serve. The texts of its
samples are written meanwhile. What a user's log of them raises is a warning: an evaluation ends no run.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from headrace.api.rollout.v1 import rollout_pb2
from headrace.client.rollout import Rollout
from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.hooks import HookArgs, hook_args, to_hook
from headrace.hooks.trainer import trainer_hook
from headrace.job.eval_sets import eval_dataset, eval_sets
from headrace.job.schema.job import Job
from headrace.limits import one_line
from headrace.rpc.log import log
from headrace.run_folder import MetricsRow, RunFolder
from headrace.sample_log import Answer, SampleLog
from headrace.trajectory import Sample, Status
from services.trainer.rl.hooks import numbers
from services.trainer.serving.report import RunReport
from services.trainer.state import JobSchedule, TrainState

_AT_ONCE = 256
_LOG_SECONDS = 600.0


class EvalSampleLog:
    """Writes one evaluation's samples into the run's sample log, in place of those of an earlier one of the same step.

    `max_bytes` is the job's sample_log_bytes. Holds at most 256 samples in memory.
    """

    def __init__(self, samples: SampleLog, max_bytes: int, step: int) -> None:
        self._log = samples
        self._step = step
        self._max_bytes = max_bytes
        self._answers: list[Answer] = []
        self._is_new = True

    async def add(self, samples: Iterable[Sample]) -> None:
        self._answers += [Answer.of(sample, self._step) for sample in samples]
        if len(self._answers) >= _AT_ONCE:
            await self.close()

    async def close(self) -> None:
        answers, self._answers = self._answers, []
        is_new, self._is_new = self._is_new, False
        try:
            await asyncio.to_thread(self._log.write_evaluated, self._step, answers, self._max_bytes, is_new=is_new)
        except OSError as error:  # what people read later is no reason to lose the result
            log.warning("evaluated_samples_not_written", step=self._step, error=str(error))


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Metrics of an evaluation, and sentences for a person where it went wrong."""

    metrics: Mapping[str, float]
    warnings: Sequence[str] = ()
    untracked: Collection[str] = ()
    """Metrics that trackers are not given, as a user's function has logged the evaluation."""


class EvaluationLog:
    """`f(rollout_id, args, data, extra_metrics) -> bool`, in a thread of rank 0, for ten minutes at most.

    `data` has for each set by name `rewards`, `truncated` and `samples`, a list each; samples that failed are left out.
    """

    def __init__(self, path: str, args: HookArgs) -> None:
        self._hook = trainer_hook(path, "eval_log")
        self._args = args

    async def __call__(self, step: int, samples: Iterable[Sample], evaluated: Evaluated) -> Evaluated:
        """Adds the function's own metrics, and where it returns True keeps the others from trackers. Raises nothing."""
        extra: dict[str, Any] = {}
        try:
            called = asyncio.to_thread(self._hook.target, step, self._args, _by_set(samples), extra)
            has_logged = bool(await asyncio.wait_for(called, _LOG_SECONDS))
        except Exception as error:  # noqa: BLE001  # a user's code
            why = f"took longer than {_LOG_SECONDS:g} s" if isinstance(error, TimeoutError) else repr(error)
            warning = f"{self._hook.path} could not log the evaluation: {one_line(why)}"
            return replace(evaluated, warnings=[*evaluated.warnings, warning])
        metrics = {**numbers(self._hook.path, extra), **evaluated.metrics}
        return replace(evaluated, metrics=metrics, untracked=tuple(evaluated.metrics) if has_logged else ())


def _by_set(samples: Iterable[Sample]) -> dict[str, dict[str, list[Any]]]:
    """`group_id` is eval/NAME/row."""
    found: dict[str, dict[str, list[Any]]] = {}
    for sample in samples:
        if sample.status is Status.FAILED:
            continue
        name = sample.group_id.removeprefix("eval/").rsplit("/", 1)[0]
        row = found.setdefault(name, {"rewards": [], "truncated": [], "samples": []})
        row["rewards"].append(sample.reward)
        row["truncated"].append(sample.status is Status.TRUNCATED)
        row["samples"].append(to_hook(sample))
    return found


Evaluate = Callable[[TrainState, Sequence[str]], Awaitable[Evaluated]]
"""Takes the names of data sets. It raises nothing: what goes wrong is in the metrics and the warnings."""


@dataclass(frozen=True, slots=True)
class _Due:
    state: TrainState
    names: Sequence[str]


class EvalScheduler:
    """The evaluations of a run, as the console sees them. This one has none: the job names no data."""

    @property
    def running_step(self) -> int | None:
        return None

    async def at(self, state: TrainState) -> None: ...

    async def finish(self) -> None: ...

    def stop(self, why: str) -> None: ...


class IntervalEvalScheduler(EvalScheduler):
    """Runs evaluations. With `exact` training waits for each, so that one version generates all its samples."""

    def __init__(self, evaluate: Evaluate, schedule: JobSchedule, report: RunReport, *, exact: bool) -> None:
        self._evaluate = evaluate
        self._schedule = schedule
        self._report = report
        self._exact = exact
        self._task: asyncio.Task[None] | None = None
        self._running: _Due | None = None
        self._waiting: _Due | None = None
        self._is_first = True
        self._stopped = False

    @property
    def running_step(self) -> int | None:
        return None if self._running is None else self._running.state.step

    async def at(self, state: TrainState) -> None:
        """Returns at once, or with `exact` when the evaluation has ended. Raises what kept a row from being written."""
        is_first, self._is_first = self._is_first, False
        names = await self._without_results(state) if is_first else self._schedule.evaluates(state.step)
        if self._stopped or not names:
            return
        if self._task is not None and self._task.done():
            self._task.result()
        if self._running is None:
            self._running = _Due(state, names)
            self._task = asyncio.create_task(self._run(self._running))
        else:
            self._displace(_Due(state, names))
        if self._exact:
            await self.finish()

    async def finish(self) -> None:
        """Waits for the one that runs and the one that waits, each of which has its own deadline."""
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()

    def stop(self, why: str) -> None:
        """Cuts off what runs and what waits; their rows say why."""
        self._stopped = True
        for due in (self._running, self._waiting):
            if due is not None:
                self._write_without_result(due.state.step, f"was cut off: {why}")
        self._running = self._waiting = None
        if self._task is not None:
            self._task.cancel()

    async def _run(self, due: _Due) -> None:
        while True:
            step = due.state.step
            evaluated = await self._evaluate(due.state, due.names)
            metrics = {**evaluated.metrics, "eval_step": float(step)}
            self._report.write(step, metrics, evaluated.warnings, untracked=evaluated.untracked)
            self._running, self._waiting = self._waiting, None
            if self._running is None:
                return
            due = self._running

    async def _without_results(self, state: TrainState) -> Sequence[str]:
        """Names the data sets whose newest evaluation by this step has no result: the run begins, or was cut off."""
        names, untold = await asyncio.to_thread(_unanswered, self._schedule, state.step, self._report.rows())
        for step in untold if names else ():
            self._write_without_result(
                step, f"has no result, as the trainer ended before it: step {state.step} is evaluated in its place"
            )
        return names

    def _displace(self, due: _Due) -> None:
        """Lets this one wait; it takes over the data sets of one that waited before."""
        if self._waiting is not None:
            self._write_without_result(
                self._waiting.state.step,
                f"was left out for that of step {due.state.step}, as the one before them still ran: raise "
                "--eval-interval, evaluate fewer samples, or let training wait with --eval-exact-version",
            )
            due = replace(due, names=tuple(dict.fromkeys((*due.names, *self._waiting.names))))
        self._waiting = due

    def _write_without_result(self, step: int, why: str) -> None:
        log.warning("evaluation_without_result", step=step, why=why)
        metrics = {"eval_error": 1.0, "eval_step": float(step)}
        self._report.write(step, metrics, [f"the evaluation of step {step} {why}"])


def _unanswered(schedule: JobSchedule, resumed_step: int, rows: Iterable[MetricsRow]) -> tuple[list[str], list[int]]:
    """The data sets whose newest evaluation has no result, and at most two steps whose evaluations no row tells of.

    Those are the one that ran and the one that waited when the trainer was killed.
    """
    newest = {name: step for step in range(resumed_step + 1) for name in schedule.evaluates(step)}
    answered, told = set[str](), set[int]()
    for row in rows:
        answered.update(name for name, due in newest.items() if row.step >= due and f"eval/{name}" in row.metrics)
        if "eval_error" in row.metrics:
            told.add(row.step)
    due = (step for step in reversed(range(resumed_step)) if schedule.evaluates(step) and step not in told)
    return [name for name in newest if name not in answered], sorted(islice(due, 2))


@dataclass(frozen=True, slots=True)
class RolloutEvalClient:
    """`await client(state, names)` returns the metrics of the data sets so named, or why there are none."""

    datasets: Sequence[rollout_pb2.EvalDataset]
    client: Rollout
    _: KW_ONLY
    seconds: float
    samples: Callable[[int], EvalSampleLog] | None = None
    users_log: EvaluationLog | None = None

    async def __call__(self, state: TrainState, names: Sequence[str]) -> Evaluated:
        """Evaluates. What goes wrong is a warning and a metric: the run does not depend on it."""
        started = time.monotonic()
        seen: list[Sample] = []
        try:
            results = await self._of_some_service(state, [each for each in self.datasets if each.name in names], seen)
        except Exception as error:  # noqa: BLE001  # of the client's own, too: no mistake in an evaluation is worth the run
            reason = error.reason if isinstance(error, HeadraceError) else type(error).__name__
            log.error("evaluation_failed", step=state.step, reason=reason, error=str(error))
            return Evaluated({"eval_error": 1.0}, (f"the evaluation failed, {reason}: {one_line(str(error))}",))
        metrics = {"eval_error": 0.0, "eval_seconds": time.monotonic() - started}
        for result in results:
            metrics |= _metrics(result)
        log.info("evaluated", step=state.step, **metrics)
        warnings = [_unscored(result) for result in results if result.num_failed]
        evaluated = Evaluated(metrics, warnings)
        return await self.users_log(state.step, seen, evaluated) if self.users_log else evaluated

    async def _of_some_service(
        self, state: TrainState, datasets: Sequence[rollout_pb2.EvalDataset], seen: list[Sample]
    ) -> Sequence[rollout_pb2.EvalResult]:
        """Evaluates, and starts again on another rollout service, if there is one, when the first one dies."""
        for others in reversed(range(len(self.client.services))):
            try:
                return await self._results(state, datasets, seen)
            except Unavailable as error:
                if not others:
                    raise
                log.warning("evaluated_by_another_service", step=state.step, error=error.message)
                seen.clear()
        raise AssertionError("unreachable: the last service's results are returned, or its error is raised")

    async def _results(
        self, state: TrainState, datasets: Sequence[rollout_pb2.EvalDataset], seen: list[Sample]
    ) -> Sequence[rollout_pb2.EvalResult]:
        """Adds to `seen` all samples, where the user's log reads them.

        Raises DeadlineExceeded after `seconds`, Unavailable when the service ended without results.
        """
        results: Sequence[rollout_pb2.EvalResult] = ()
        try:
            async with asyncio.timeout(self.seconds):
                replies = self.client.watch_evaluation(
                    f"step-{state.step}-{uuid.uuid4().hex[:8]}",
                    datasets,
                    return_samples=self.samples is not None or self.users_log is not None,
                    deadline_seconds=self.seconds,
                )
                writing = self.samples(state.step) if self.samples else None
                async for reply in replies:
                    results, samples = reply.results, [Sample.unpack(one) for one in reply.samples]
                    if writing:
                        await writing.add(samples)
                    if self.users_log is not None:
                        seen += samples
                if writing:
                    await writing.close()
        except (TimeoutError, DeadlineExceeded) as error:
            raise DeadlineExceeded(
                f"it took longer than rollout_timeout_seconds {self.seconds:g}: evaluate fewer samples, or raise "
                "--rollout-timeout-seconds"
            ) from error
        if not results:
            raise Unavailable("the rollout service ended it without results")
        return results


def _metrics(result: rollout_pb2.EvalResult) -> dict[str, float]:
    metrics = {
        f"eval/{result.name}": result.mean_reward,
        f"eval_length/{result.name}": result.mean_response_tokens,
        f"eval_truncated/{result.name}": result.truncated_ratio,
        f"eval_failed/{result.name}": float(result.num_failed),
        f"eval_min_version/{result.name}": float(result.min_policy_version),
        f"eval_max_version/{result.name}": float(result.max_policy_version),
    }
    if result.HasField("low"):
        metrics |= {f"eval_low/{result.name}": result.low, f"eval_high/{result.name}": result.high}
    for each in result.pass_at_k:
        name = f"{result.name}@{each.k}"
        metrics[f"eval_pass/{name}"] = each.estimate
    return metrics


def _unscored(result: rollout_pb2.EvalResult) -> str:
    of = result.num_failed + result.num_samples
    return f"{result.num_failed} of {of} samples of {result.name} have no score and are left out of its mean"


def evaluations_of(
    job: Job, rollout: Rollout | None, schedule: JobSchedule, report: RunReport, folder: RunFolder
) -> EvalScheduler:
    """Evaluates on the data sets that the job names, where there are engines."""
    if rollout is None or not job.eval.is_asked_for:
        return EvalScheduler()
    datasets = [eval_dataset(each, job.eval, job.rollout, job.data) for each in eval_sets(job.eval)]
    num_bytes = job.tracking.sample_log_bytes
    path = job.hooks.custom_eval_rollout_log_function_path
    client = RolloutEvalClient(
        datasets,
        rollout,
        seconds=job.rollout.rollout_timeout_seconds,
        samples=partial(EvalSampleLog, SampleLog(folder.samples), num_bytes) if num_bytes else None,
        users_log=EvaluationLog(path, hook_args(job)) if path else None,
    )
    waits = job.eval.eval_exact_version or job.placement.colocate  # there it needs the devices to itself
    return IntervalEvalScheduler(client, schedule, report, exact=waits)
