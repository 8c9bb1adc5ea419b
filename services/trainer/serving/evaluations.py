"""Evaluations beside training: one at a time, each with a row of metrics when it ends.

States: idle → running → idle. One that is due while another runs waits for it; a newer one takes its place, and a row
says so. Nothing is durable but the rows: what a stop or a kill cuts off has none with a result, so that a resumed run
evaluates again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from headrace.metrics_row import MetricsRow
from headrace.rpc.log import log
from services.trainer.schedule import JobSchedule
from services.trainer.serving.report import RunReport
from services.trainer.state import TrainState


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Metrics of an evaluation, and sentences for a person where it went wrong."""

    metrics: Mapping[str, float]
    warnings: Sequence[str] = ()
    untracked: Collection[str] = ()
    """Metrics that trackers are not given, as a user's function has logged the evaluation."""


Evaluate = Callable[[TrainState, Sequence[str]], Awaitable[Evaluated]]
"""Takes the names of data sets. It raises nothing: what goes wrong is in the metrics and the warnings."""


@dataclass(frozen=True, slots=True)
class _Due:
    """The data sets that are due after a step."""

    state: TrainState
    names: Sequence[str]


class Evaluations(Protocol):
    """The evaluations of a run, as the console sees them."""

    @property
    def running_step(self) -> int | None:
        """The step of the one that runs; None when none does."""

    async def at(self, state: TrainState) -> None:
        """Starts the evaluation that is due at this step, if one is."""

    async def finish(self) -> None:
        """Returns when none runs."""

    def stop(self, why: str) -> None:
        """Cuts off what runs, and starts nothing more."""


class NoEvaluations:
    """The evaluations of a job without evaluation data."""

    running_step = None

    async def at(self, state: TrainState) -> None: ...

    async def finish(self) -> None: ...

    def stop(self, why: str) -> None: ...


class JobEvaluations:
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
        """The step of the one that runs; None when none does."""
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
