"""Says what a trainer without a batch waits for, and which service has to bring it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.view.engines import engines_line
from headrace.cli.view.failures import failures_line
from headrace.cli.view.step_line import duration
from headrace.limits import one_line

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
