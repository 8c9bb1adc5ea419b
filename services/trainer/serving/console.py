"""Shows the loop to people and serves their requests.

Requests (pause, save, export, stop) are served between two steps, when no rank computes. A request is served whether or
not its caller still waits, and its failure is its caller's: training goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.errors import FailedPrecondition, Fenced, HeadraceError, Unavailable
from headrace.rpc import tracing
from headrace.rpc.log import log
from services.trainer.serving.evaluation import EvalScheduler
from services.trainer.serving.report import RunReport
from services.trainer.state import TrainState


class Savable(Protocol):
    """The ranks' methods that requests need."""

    async def save(self, state: TrainState) -> None: ...

    async def flush(self) -> None: ...

    def checkpoint_path(self, step: int) -> Path: ...

    async def export_to(self, path: Path) -> None: ...


Action = Callable[[Savable, TrainState], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Request:
    action: Action
    done: asyncio.Future[TrainState]


class Requests:
    """The actions that wait, in order. A failure is its caller's alone."""

    def __init__(self) -> None:
        self._waiting: list[_Request] = []

    def add(self, action: Action) -> asyncio.Future[TrainState]:
        """Returns the state that the action will have run in."""
        request = _Request(action, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        return request.done

    async def serve(self, ranks: Savable, state: TrainState) -> None:
        """Runs what waits. Raises Fenced where the trainer is not the newest any more."""
        while self._waiting:
            request = self._waiting[0]  # it stays in the list while it is served: `refuse` answers what is left
            try:
                await request.action(ranks, state)
            except HeadraceError as error:
                self._waiting.remove(request)
                request.done.set_exception(error)
                if isinstance(error, Fenced):
                    raise
                log.warning("request_failed", step=state.step, reason=error.reason, error=error.message)
            else:
                self._waiting.remove(request)
                request.done.set_result(state)

    def refuse(self, error: Callable[[], HeadraceError]) -> None:
        for request in self._waiting:
            request.done.set_exception(error())
        self._waiting.clear()


class TrainerConsole:
    """The loop's `Console`. All of it runs on rank 0's event loop."""

    def __init__(
        self,
        report: RunReport,
        evaluations: EvalScheduler,
        *,
        run: str,
        num_steps: int,
        groups_per_step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._report = report
        self._evaluations = evaluations
        self._requests = Requests()
        self._running = asyncio.Event()
        self._running.set()
        self._stopped = asyncio.Event()
        self.leaving = False
        """True once the run is to be left, to be gone on with by another start."""
        self._has_steps = True
        self.verdict: str | None = None
        """Why the run was given up; None unless it was."""
        self._waiting_since = 0.0
        self._ended = False
        self._ranks: Savable | None = None
        self._produced: Mapping[str, float] = {}
        self._untracked: frozenset[str] = frozenset()
        self._seconds: dict[int, float] = defaultdict(float)
        self._reported_at: float | None = None
        """The clock when the current step began; the start of the run belongs to no step"""
        self._status = pb.GetStatusResponse(
            run=run, phase=pb.PHASE_STARTING, num_steps=num_steps, groups_per_step=groups_per_step
        )

    @property
    def status(self) -> pb.GetStatusResponse:
        is_waiting = self._status.phase == pb.PHASE_WAITING
        self._status.waiting_seconds = time.monotonic() - self._waiting_since if is_waiting else 0.0
        self._status.ClearField("evaluating_step")
        if (evaluating := self._evaluations.running_step) is not None:
            self._status.evaluating_step = evaluating
        return self._status

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set()

    @property
    def goes_on(self) -> bool:
        """True where the run was left in the middle: another start goes on with it."""
        return self.leaving and self.verdict is None and not self._status.error

    @contextmanager
    def phase(self, phase: pb.Phase.ValueType) -> Iterator[None]:
        """Shows the phase while the block runs, and the one before it afterwards."""
        before, self._status.phase = self._status.phase, phase
        started = self._clock()
        try:
            traces = tracing.step(self._status.step) if phase in _SPANS else ()
            with tracing.span(_SPANS.get(phase, ""), traces, {tracing.STEP: self._status.step}):
                yield
        finally:
            self._status.phase = before
            self._seconds[phase] += self._clock() - started

    def open(self, ranks: Savable, world_size: int, step: int = 0) -> None:
        self._ranks = ranks
        self._status.step = step
        self._status.world_size = world_size

    def open_without_steps(self, world_size: int) -> None:
        """The ranks are up, and carry out what clients of Tinker's API ask for."""
        self._has_steps = False
        self._status.num_steps = 0
        self._status.world_size = world_size
        self._status.phase, self._waiting_since = pb.PHASE_WAITING, time.monotonic()

    async def until_stopped(self) -> None:
        await self._stopped.wait()

    def finished(self, error: str | None = None) -> None:
        self._status.phase = pb.PHASE_FAILED if error else pb.PHASE_FINISHED
        self._status.error = error or ""
        self._ended = True
        self._evaluations.stop("the run ended")
        self._requests.refuse(self._gone)
        self._report.close()

    def groups_ready(self, count: int) -> None:
        self._status.groups_ready = count

    def produced(self, metrics: Mapping[str, float]) -> None:
        """The batch is here: takes the production since the one before, which is reported with the step."""
        self._status.phase = pb.PHASE_TRAINING
        self._produced = metrics
        step, now = self._status.step, time.time()
        begun = now - (time.monotonic() - self._waiting_since)
        tracing.record("headrace.wait", tracing.step(step), begun, now, {tracing.STEP: step})

    def mark(self, text: str) -> None:
        self._report.mark(text)

    def keep_from_trackers(self, names: Iterable[str]) -> None:
        """These metrics of the step are reported to people and files, and not to trackers."""
        self._untracked = frozenset(names)

    async def before_step(self, state: TrainState) -> bool:
        self._show(state)
        if self._reported_at is None:
            self._reported_at = self._clock()
            self._seconds.clear()
        await self._serve(state)
        if not self._running.is_set():
            with self.phase(pb.PHASE_PAUSED):
                while not self._running.is_set():
                    await self._running.wait()
                    await self._serve(state)
        self._status.phase, self._waiting_since = pb.PHASE_WAITING, time.monotonic()
        return not self.stopping

    async def evaluate(self, state: TrainState) -> None:
        self._show(state)
        with self.phase(pb.PHASE_EVALUATING):
            await self._evaluations.at(state)

    async def evaluated(self) -> None:
        with self.phase(pb.PHASE_EVALUATING):
            await self._evaluations.finish()

    def report(self, state: TrainState, metrics: dict[str, float]) -> None:
        self._show(state)
        times = self._times()
        now, step = time.time(), state.step - 1
        begun = now - times["time/step_seconds"]
        tracing.record("rl.loop", tracing.step(step), begun, now, {tracing.STEP: step}, is_root=True)
        metrics = {**metrics, **self._produced, **times} | {"policy_version": float(state.policy_version)}
        self._report.write(state.step, metrics, untracked=self._untracked)
        self._untracked = frozenset()
        log.info("step", step=state.step, **{k: round(v, 6) for k, v in metrics.items() if k in _LOGGED})

    async def ask(self, action: Action) -> TrainState:
        """Runs the action before the next step; returns the state it ran in. Raises what the action raised.

        Cancelling the wait cancels nothing else: the loop may be in the middle of the action.
        """
        if self._ended:
            raise self._gone()
        if not self._has_steps:
            raise FailedPrecondition("this run has no steps: clients of Tinker's API save and load their own models")
        done = self._requests.add(action)
        if not self._running.is_set():
            self._running.set()  # wake the paused loop to serve it; it holds again at once
            self._running.clear()
        return await asyncio.shield(done)

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def stop(self) -> None:
        self._stopped.set()
        self._evaluations.stop("the run was stopped")
        self._running.set()

    def leave(self) -> None:
        """SIGTERM: a checkpoint, and nothing that a finished run does."""
        self.leaving = True
        self.stop()

    def give_up(self, verdict: str) -> None:
        """The run cannot learn: it is left, and ends with the verdict."""
        self.verdict = verdict
        self.leave()

    def _gone(self) -> HeadraceError:
        if self.goes_on:
            return Unavailable("the trainer has left the run, to go on with it later: ask again when it is back")
        return FailedPrecondition("the run has ended: its last checkpoint and export are in its folder")

    async def _serve(self, state: TrainState) -> None:
        assert self._ranks is not None  # the loop runs only after open()
        await self._requests.serve(self._ranks, state)

    def _times(self) -> dict[str, float]:
        """The seconds of each phase since the step before."""
        assert self._reported_at is not None  # before_step came first
        now = self._clock()
        found = {name: self._seconds[phase] for phase, name in _TIMES.items()}
        found["time/step_seconds"] = step_seconds = now - self._reported_at
        if step_seconds > 0:
            found["busy/trainer"] = found["time/train_seconds"] / step_seconds
        self._reported_at = now
        self._seconds.clear()
        return found

    def _show(self, state: TrainState) -> None:
        self._status.step = state.step
        self._status.policy_version = state.policy_version
        self._status.epoch = state.epoch
        self._status.groups_ready = 0


_TIMES = {
    pb.PHASE_WAITING: "time/wait_seconds",
    pb.PHASE_TRAINING: "time/train_seconds",
    pb.PHASE_PUBLISHING: "time/publish_seconds",
    pb.PHASE_SAVING: "time/save_seconds",
    pb.PHASE_EVALUATING: "time/evaluate_seconds",
}
_SPANS = {
    pb.PHASE_TRAINING: "rl.train",
    pb.PHASE_PUBLISHING: "rl.sync",
    pb.PHASE_SAVING: "headrace.save",
    pb.PHASE_EVALUATING: "headrace.evaluate",
    pb.PHASE_PAUSED: "headrace.pause",
}
"""The first names of OpenTelemetry's proposed conventions for reinforcement learning (rl.*), where they have one"""

_LOGGED = frozenset(
    {
        "reward/mean",
        "reward/all/mean",
        "loss/policy",
        "loss/sft",
        "grad_norm",
        "log_prob_diff/mean",
        "log_prob_diff/max",
        "tokens_per_second",
    }
)
