"""Says what stalls a run: a batch that is overdue, a phase that takes long, a service that has stopped answering."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.view.lines import duration, engines_line, failures_line
from headrace.limits import one_line
from headrace.run_folder import fields_in

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
