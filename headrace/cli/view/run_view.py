"""A running job as the console shows it: what its services answer, as a live table or as lines."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.view.lines import (
    FailureNotes,
    duration,
    engines_line,
    evaluation_line,
    evaluations,
    failures_line,
    skipped_line,
    step_line,
)
from headrace.client.open import open_buffer, open_rollout
from headrace.client.trainer import TrainerClient
from headrace.errors import HeadraceError
from headrace.job.schema.run import RunSection
from headrace.limits import one_line
from headrace.run_folder import fields_in

_BARS = "▁▂▃▄▅▆▇█"
_NOTES_SHOWN = 4
_SPARKS_SHOWN = 48
_STEPS_BEFORE_GUESSING = 2
WARNING_CHARACTERS = 600
_REWARDS = {"reward/all/mean": "reward", "reward/mean": "reward of trained samples"}
_ENDED = (trainer_pb2.PHASE_FINISHED, trainer_pb2.PHASE_FAILED)


class RunView:
    """Written by the follower and the launcher, read by the display. One event loop, so no locks."""

    def __init__(self, run: RunSection, num_rollout: int, resumed_step: int = 0) -> None:
        self.run_name = run.run_name
        self._num_rollout = num_rollout
        self._resumed_step = resumed_step
        self._started = time.monotonic()
        self._started_at = time.time()
        self._notes: deque[str] = deque(maxlen=200)
        self._unread: deque[str] = deque()
        self._status: trainer_pb2.GetStatusResponse | None = None
        self._fleet: rollout_pb2.GetFleetResponse | None = None
        self._stats: buffer_pb2.StreamStats | None = None
        self._silence = Silence()
        self._failure_notes = FailureNotes()
        self._patience = Patience()
        self._long_phase = LongPhase()
        self._tokens: deque[tuple[float, int]] = deque(maxlen=20)
        self._trained: set[int] = set()
        self._rewards: dict[str, dict[int, float]] = {name: {} for name in _REWARDS}
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._evaluations: dict[str, dict[int, float]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._warned: set[str] = set()
        self._latest: Mapping[str, float] = {}
        self._skipped = ""
        """What the filter skipped for the latest step"""
        self.ended = False

    def note(self, line: str) -> None:
        """Adds a line that a person should read once."""
        self._notes.append(line)
        self._unread.append(line)

    def end(self) -> None:
        """Marks that nothing more will come."""
        self.ended = True

    @property
    def trainer_has_ended(self) -> bool:
        return self._status is not None and self._status.phase in _ENDED

    def unread(self) -> list[str]:
        """Lines since the last call, for plain output."""
        lines = list(self._unread)
        self._unread.clear()
        return lines

    def on_status(self, status: trainer_pb2.GetStatusResponse) -> None:
        """The trainer's answer. A batch that is long overdue is a note, and so is a publication without an end."""
        self._status = status
        self._silence.answered("trainer")
        if status.phase == trainer_pb2.PHASE_WAITING and self._patience.is_over(status.step, status.waiting_seconds):
            self.note(awaited(status, self._fleet, self._stats, self._silence.since()))
        if line := self._long_phase.line(status, self._silence.since()):
            self.note(line)

    def on_stats(self, stats: buffer_pb2.StreamStats) -> None:
        """The buffer's answer. Samples that fail are notes, as they come."""
        self._stats = stats
        self._silence.answered("buffer")
        for line in self._failure_notes.lines(stats.production):
            self.note(line)

    def on_fleet(self, fleet: rollout_pb2.GetFleetResponse) -> None:
        """The rollout service's answer. What it warns of is a note, once."""
        self._fleet = fleet
        self._silence.answered("rollout")
        for warning in fleet.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self.note(one_line(warning, WARNING_CHARACTERS))
        self._tokens.append((time.monotonic(), fleet.tokens_produced))

    def on_silence(self, service: str) -> None:
        """Marks a service as silent, unless the run has ended: then its services stop."""
        if not self.trainer_has_ended:
            self._silence.unanswered(service)

    def on_progress(self, row: trainer_pb2.WatchProgressResponse) -> None:
        """A finished step (counted from 1) or evaluation. A step that is trained again replaces the first.

        What an earlier start trained is in the curves and is not said again.
        """
        key = (row.step, row.time.ToNanoseconds())
        if key in self._seen:
            return
        self._seen.add(key)
        metrics = dict(row.metrics)
        for name in _REWARDS.keys() & metrics.keys():
            self._rewards[name][row.step] = metrics[name]
        is_old = row.step <= self._resumed_step and row.time.ToNanoseconds() < self._started_at * 1e9
        if "time/step_seconds" in metrics and not is_old:
            self._step_seconds.append(metrics["time/step_seconds"])
            self._patience.waited(metrics.get("time/wait_seconds", 0.0))
            self._long_phase.took(metrics)
        for warning in row.warnings:
            self.note(f"after step {row.step}: {warning}")
        for name in evaluations(metrics):
            self._evaluations.setdefault(name, {})[row.step] = metrics[name]
        self._latest = {**self._latest, **metrics}
        if is_old:
            return
        if shown := step_line(metrics):
            self._trained.add(row.step)
            self._skipped = skipped_line(metrics)
            skipped = f"; {self._skipped}" if self._skipped else ""
            self._unread.append(f"step {row.step}/{self._num_rollout}: {shown}{self._left(row.step)}{skipped}")
        if shown := evaluation_line(metrics):
            self._unread.append(f"evaluation after step {row.step}: {shown}")

    def tokens_per_second(self) -> float:
        """Response tokens per second over the last twenty answers of the rollout service."""
        if len(self._tokens) < 2:
            return 0.0
        (first, before), (last, after) = self._tokens[0], self._tokens[-1]
        return max(after - before, 0) / max(last - first, 1e-9)

    def summary(self) -> list[str]:
        """Describes the finished run in a few lines."""
        earlier = f" after the {self._resumed_step} of earlier starts" if self._resumed_step else ""
        took = duration(time.monotonic() - self._started)
        lines = [f"finished {len(self._trained)} steps{earlier} in {took}"]
        for name, label in _REWARDS.items():
            rewards = self._rewards_of(name)
            if len(rewards) >= 6:
                before, after = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
                lines.append(f"mean {label}: first three steps {before:.3f}, last three {after:.3f}")
        for name, values in sorted(self._evaluations.items()):
            ends = sorted({min(values), max(values)})
            lines.append(f"{name}: {', '.join(f'{values[step]:.3f} after step {step}' for step in ends)}")
        return lines

    def __rich__(self) -> RenderableType:
        notes = Text("\n".join(list(self._notes)[-_NOTES_SHOWN:]))
        return Panel(Group(self._table(), notes), title=f"headrace · {self.run_name}", title_align="left")

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        table.add_column()
        step, steps, phase = self._position()
        table.add_row("step", _bar(step, steps), f"{step}/{steps}  {phase}{self._left(step)}")
        if self._status and self._status.groups_per_step:
            ready, wanted = self._status.groups_ready, self._status.groups_per_step
            table.add_row("groups", _bar(ready, wanted), f"{ready}/{wanted} ready")
        for name, label in _REWARDS.items():
            rewards = self._rewards_of(name)
            table.add_row(label, sparkline(rewards[-_SPARKS_SHOWN:]), f"{rewards[-1]:.3f}" if rewards else "–")
        for name, values in sorted(self._evaluations.items()):
            shown = [values[step] for step in sorted(values)]
            table.add_row(name, sparkline(shown[-_SPARKS_SHOWN:]), f"{shown[-1]:.3f}")
        table.add_row("training", step_line(self._latest, skip=tuple(_REWARDS)) or "–", "")
        if self._skipped:
            table.add_row("", Text(self._skipped), "")
        table.add_row("rollout", *self._rollout())
        if since := self._silence.since().get("buffer"):
            table.add_row("buffer", unanswered(since), "")
        if self._stats and (failures := failures_line(self._stats.production)):
            table.add_row("failures", Text(failures), "")
        return table

    def _rewards_of(self, name: str) -> list[float]:
        """Rewards in the order of the steps."""
        return [self._rewards[name][step] for step in sorted(self._rewards[name])]

    def _position(self) -> tuple[int, int, str]:
        if self._status is None:
            return 0, self._num_rollout, "starting"
        phase = trainer_pb2.Phase.Name(self._status.phase).removeprefix("PHASE_").lower()
        if since := self._silence.since().get("trainer"):
            phase = f"trainer {unanswered(since)}"
        return self._status.step, self._status.num_steps or self._num_rollout, phase

    def _left(self, step: int) -> str:
        """Estimates the time to the last step; empty before there is an estimate, and at the end."""
        steps_left = self._num_rollout - step
        if len(self._step_seconds) < _STEPS_BEFORE_GUESSING or steps_left <= 0:
            return ""
        return f", about {duration(statistics.median(self._step_seconds) * steps_left)} left"

    def _rollout(self) -> tuple[str, str]:
        if self._fleet is None:
            return "starting", ""
        if since := self._silence.since().get("rollout"):
            return unanswered(since), ""
        return (
            f"{engines_line(self._fleet.engines)}, {self._fleet.samples_in_flight} samples in flight, "
            f"{self.tokens_per_second():.0f} tokens/s",
            f"policy version {self._fleet.policy_version}",
        )


def sparkline(values: Sequence[float]) -> str:
    """One character for each value, scaled from the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=min(done, total), width=_SPARKS_SHOWN)


_PAUSE_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0

T = TypeVar("T")


async def follow(address_of: Callable[[str], str], view: RunView, *, alone: bool = False) -> None:
    """Feeds the view until it is cancelled. `address_of` knows where a service is; `alone`: the trainer is all."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_progress(address_of, view))
        tasks.create_task(_status(address_of, view))
        if alone:
            return
        tasks.create_task(_fleet(address_of, view))
        tasks.create_task(_stats(address_of, view))


async def _progress(address_of: Callable[[str], str], view: RunView) -> None:
    step = 0
    async with TrainerClient(address_of("trainer")) as trainer:
        while True:
            with suppress(HeadraceError):  # it starts or restarts: ask again
                async for row in trainer.watch_progress(step):
                    step = row.step  # it may have another row: evaluation comes after training
                    view.on_progress(row)
            await asyncio.sleep(_PAUSE_SECONDS)


async def _status(address_of: Callable[[str], str], view: RunView) -> None:
    async with TrainerClient(address_of("trainer"), deadline_seconds=_PATIENCE_SECONDS) as trainer:
        await _asked(view, "trainer", trainer.status, view.on_status)


async def _stats(address_of: Callable[[str], str], view: RunView) -> None:
    async with open_buffer(address_of("buffer"), deadline_seconds=_PATIENCE_SECONDS) as buffer:
        await _asked(view, "buffer", lambda: buffer.stats("train"), view.on_stats)


async def _fleet(address_of: Callable[[str], str], view: RunView) -> None:
    address = address_of("rollout")
    async with open_rollout(address, deadline_seconds=_PATIENCE_SECONDS, run=view.run_name) as rollout:
        await _asked(view, "rollout", rollout.get_fleet, view.on_fleet)


async def _asked(view: RunView, service: str, ask: Callable[[], Awaitable[T]], on_answer: Callable[[T], None]) -> None:
    while True:
        try:
            on_answer(await ask())
        except HeadraceError:  # it starts or restarts: ask again
            view.on_silence(service)
        await asyncio.sleep(_PAUSE_SECONDS)


_REFRESH_SECONDS = 0.25


async def show(view: RunView, console: Console) -> None:
    """Returns when the view has ended."""
    if console.is_terminal:
        await _table(view, console)
    else:
        await _lines(view)


async def _table(view: RunView, console: Console) -> None:
    with Live(view, console=console, auto_refresh=False) as live:
        while not view.ended:
            live.update(view, refresh=True)
            await asyncio.sleep(_REFRESH_SECONDS)
        live.update(view, refresh=True)


async def _lines(view: RunView) -> None:
    while True:
        ended = view.ended
        for line in view.unread():
            print(line, flush=True)
        if ended:
            return
        await asyncio.sleep(_REFRESH_SECONDS)


# What stalls a run: a batch that is overdue, a phase that takes long, a service that has stopped answering.

FIRST_BATCH_SECONDS = 30.0
"""How long the first batch should take."""
_TIMES_AS_LONG = 10
_WAITS_REMEMBERED = 20
_NOBODY: Mapping[str, str] = MappingProxyType({})


class Patience:
    """Says when a wait has taken ten times as long as expected, and again whenever it has doubled since."""

    def __init__(self, first_seconds: float = FIRST_BATCH_SECONDS) -> None:
        self._first_seconds = first_seconds
        self._waits: deque[float] = deque(maxlen=_WAITS_REMEMBERED)
        self._told: tuple[int, float] = (-1, 0.0)
        """The step that was spoken of last, and how long it had waited."""

    def waited(self, seconds: float) -> None:
        """Records how long a step waited for its batch."""
        self._waits.append(seconds)

    def is_over(self, step: int, seconds: float) -> bool:
        """True when a person should be told; remembers that they were."""
        expected = max(statistics.median(self._waits), 1.0) if self._waits else self._first_seconds
        told_step, told_seconds = self._told
        limit = max(_TIMES_AS_LONG * expected, 2 * told_seconds if told_step == step else 0.0)
        if seconds < limit:
            return False
        self._told = (step, seconds)
        return True


def awaited(
    status: trainer_pb2.GetStatusResponse,
    fleet: rollout_pb2.GetFleetResponse | None,
    stats: buffer_pb2.StreamStats | None,
    silent: Mapping[str, str] = _NOBODY,
) -> str:
    """One line; None stands for a service that has not answered.

    `silent` has those that answered once and do not now, with the time of their last answer.
    """
    line = (
        f"step {status.step + 1} has waited {duration(status.waiting_seconds)} for its batch, "
        f"{status.groups_ready}/{status.groups_per_step} groups ready: waiting {_on_whom(fleet, stats, silent)}"
    )
    failures = failures_line(stats.production) if stats else ""
    return f"{line}; {failures}" if failures else line


def _on_whom(
    fleet: rollout_pb2.GetFleetResponse | None, stats: buffer_pb2.StreamStats | None, silent: Mapping[str, str]
) -> str:
    if stats is None or "buffer" in silent:
        return f"on the buffer, which {unanswered(silent.get('buffer'))}"
    if stats.trouble:
        return f"for prompts: {one_line(stats.trouble)}"
    if fleet is None or "rollout" in silent:
        return f"on the rollout service, which {unanswered(silent.get('rollout'))}"
    if fleet.engines and not any(engine.state == rollout_pb2.ENGINE_STATE_READY for engine in fleet.engines):
        return f"on the rollout service: {engines_line(fleet.engines)}"
    if fleet.paused:
        return "on the rollout service: production is paused"
    if fleet.samples_in_flight:
        return f"on the rollout service: {fleet.samples_in_flight} samples are being generated"
    if fleet.samples_being_scored:
        scored = f"{fleet.samples_being_scored} samples wait for their scores"
        return f"on the reward service at {fleet.reward_address}: {scored}"
    if not stats.groups["LEASED"] and not stats.groups["QUEUED"]:
        return "for prompts: none is queued; submit some with `headrace submit`"
    return f"on the rollout service: it works on {stats.groups['LEASED']} groups, {stats.groups['QUEUED']} are queued"


def unanswered(since: str | None) -> str:
    """Describes a silent service, with the time of its last answer if it has answered before."""
    return "does not answer" if since is None else f"has not answered since {since}"


class Silence:
    """A service that has never answered is starting, not silent."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._answered: dict[str, float] = {}
        """When each service answered last"""
        self._silent: set[str] = set()

    def answered(self, service: str) -> None:
        self._answered[service] = self._clock()
        self._silent.discard(service)

    def unanswered(self, service: str) -> None:
        """Marks the service as silent, if it has answered before."""
        if service in self._answered:
            self._silent.add(service)

    def since(self) -> dict[str, str]:
        """The time of day of the last answer of each service that is silent."""
        times = {name: time.localtime(self._answered[name]) for name in sorted(self._silent)}
        return {name: time.strftime("%H:%M:%S", answered) for name, answered in times.items()}


_EXPECTED_SECONDS = 6.0
_PHASES: Mapping[trainer_pb2.Phase.ValueType, tuple[str, str]] = {
    trainer_pb2.PHASE_PUBLISHING: ("publishing the weights", "time/publish_seconds"),
    trainer_pb2.PHASE_SAVING: ("saving a checkpoint", "time/save_seconds"),
    trainer_pb2.PHASE_EVALUATING: ("evaluating", "time/evaluate_seconds"),
}
"""What the trainer does in a phase, and the metric of its seconds."""


class LongPhase:
    """Notices long phases other than waiting for a batch. Sees every status of the trainer; `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._patience = {phase: Patience(_EXPECTED_SECONDS) for phase in _PHASES}
        self._now: tuple[trainer_pb2.Phase.ValueType, int] | None = None
        """The phase and its step, as the trainer said last"""
        self._since = 0.0
        self._count = 0

    def took(self, metrics: Mapping[str, float]) -> None:
        """Records a step's seconds."""
        for phase, (_, name) in _PHASES.items():
            if name in metrics:
                self._patience[phase].waited(metrics[name])

    def line(self, status: trainer_pb2.GetStatusResponse, silent: Mapping[str, str]) -> str | None:
        """A line at ten times the usual, and again whenever it has doubled; `silent` has services and last answers."""
        if self._now != (status.phase, status.step):
            self._now, self._since, self._count = (status.phase, status.step), self._clock(), self._count + 1
        if status.phase not in _PHASES:
            return None
        seconds = self._clock() - self._since
        if not self._patience[status.phase].is_over(self._count, seconds):
            return None
        what = f"{_PHASES[status.phase][0]}: {duration(seconds)} so far"
        return f"{what}; the rollout service {unanswered(silent['rollout'])}" if "rollout" in silent else what


def waits_too_long(status: trainer_pb2.GetStatusResponse, metrics: Path) -> bool:
    """True for a batch that takes ten times as long as those before it, whose waits are in a run's metrics."""
    if status.phase != trainer_pb2.PHASE_WAITING:
        return False
    patience = Patience()
    for fields in fields_in(metrics):
        if "time/wait_seconds" in fields:
            patience.waited(fields["time/wait_seconds"])
    return patience.is_over(status.step, status.waiting_seconds)
