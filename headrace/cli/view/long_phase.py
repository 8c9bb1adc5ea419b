"""Says when a trainer publishes, saves or evaluates for much longer than usual."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.view.awaited import Patience, unanswered
from headrace.cli.view.step_line import duration

_EXPECTED_SECONDS = 6.0
_PHASES: Mapping[trainer_pb2.Phase.ValueType, tuple[str, str]] = {
    trainer_pb2.PHASE_PUBLISHING: ("publishing the weights", "time/publish_seconds"),
    trainer_pb2.PHASE_SAVING: ("saving a checkpoint", "time/save_seconds"),
    trainer_pb2.PHASE_EVALUATING: ("evaluating", "time/evaluate_seconds"),
}
"""What the trainer does in a phase, and the metric of its seconds."""


class LongPhase:
    """Waits that are no batch's. Asked with every answer of the trainer; `clock` counts seconds."""

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
