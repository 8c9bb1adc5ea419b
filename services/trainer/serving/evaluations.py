"""Evaluations beside training: one at a time, each with a row of metrics when it ends.

States: idle → running → idle. One that is due while another runs waits for it; a newer one takes its place, and a row
says so. Nothing is durable but the rows: what a stop or a kill cuts off has none with a result, so that a resumed run
evaluates again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.rpc.log import log
from services.trainer.schedule import JobSchedule
from services.trainer.serving.report import RunReport
from services.trainer.state import TrainState


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Metrics of an evaluation, and sentences for a person where it went wrong."""

    metrics: Mapping[str, float]
    warnings: Sequence[str] = ()


Evaluate = Callable[[TrainState], Awaitable[Evaluated]]
"""It raises nothing: what goes wrong is in the metrics and the warnings."""


class Evaluations(Protocol):
    """The evaluations of a run, as the console sees them."""

    async def at(self, state: TrainState) -> None:
        """Starts the evaluation that is due at this step, if one is."""

    async def finish(self) -> None:
        """Returns when none runs."""

    def stop(self, why: str) -> None:
        """Cuts off what runs, and starts nothing more."""


class NoEvaluations:
    """The evaluations of a job without evaluation data."""

    async def at(self, state: TrainState) -> None: ...

    async def finish(self) -> None: ...

    def stop(self, why: str) -> None: ...


class JobEvaluations:
    """With `exact` training waits for each evaluation, so that one version of the weights generates all its samples."""

    def __init__(self, evaluate: Evaluate, schedule: JobSchedule, report: RunReport, *, exact: bool) -> None:
        self._evaluate = evaluate
        self._schedule = schedule
        self._report = report
        self._exact = exact
        self._task: asyncio.Task[None] | None = None
        self._running: TrainState | None = None
        self._waiting: TrainState | None = None
        self._is_first = True
        self._stopped = False

    async def at(self, state: TrainState) -> None:
        """Returns at once, or with `exact` when the evaluation has ended. Raises what kept a row from being written."""
        is_first, self._is_first = self._is_first, False
        if self._stopped or not (self._starts_with(state) if is_first else self._schedule.evaluates(state.step)):
            return
        if self._task is not None and self._task.done():
            self._task.result()
        if self._running is None:
            self._running = state
            self._task = asyncio.create_task(self._run(state))
        else:
            self._displace(state)
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
        for state in (self._running, self._waiting):
            if state is not None:
                self._without_result(state, f"was cut off: {why}")
        self._running = self._waiting = None
        if self._task is not None:
            self._task.cancel()

    async def _run(self, state: TrainState) -> None:
        while True:
            evaluated = await self._evaluate(state)
            self._report.write(state.step, {**evaluated.metrics, "eval_step": float(state.step)}, evaluated.warnings)
            self._running, self._waiting = self._waiting, None
            if self._running is None:
                return
            state = self._running

    def _starts_with(self, state: TrainState) -> bool:
        """True where the newest evaluation that was due by this step has no result: the run begins, or was cut off."""
        due = next((step for step in range(state.step, -1, -1) if self._schedule.evaluates(step)), None)
        results = [row.step for row in self._report.rows if row.metrics.get("eval_error") == 0.0]
        if due is None or max(results, default=-1) >= due:
            return False
        if due < state.step:
            self._without_result(
                TrainState(due, due, state.epoch),
                f"has no result, as the trainer ended before it: step {state.step} is evaluated in its place",
            )
        return True

    def _displace(self, state: TrainState) -> None:
        if self._waiting is not None:
            self._without_result(
                self._waiting,
                f"was left out for that of step {state.step}, as the one before them still ran: raise --eval-interval, "
                "evaluate fewer samples, or let training wait with --eval-exact-version",
            )
        self._waiting = state

    def _without_result(self, state: TrainState, why: str) -> None:
        log.warning("evaluation_without_result", step=state.step, why=why)
        self._report.write(
            state.step,
            {"eval_error": 1.0, "eval_step": float(state.step)},
            [f"the evaluation of step {state.step} {why}"],
        )
