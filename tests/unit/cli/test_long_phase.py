"""Publications, saves and evaluations that take too long are told, with the service that is silent."""

from __future__ import annotations

import pytest

from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.view.stalls import LongPhase
from tests.support.run_views import view_of

PUBLISHING = trainer_pb2.GetStatusResponse(phase=trainer_pb2.PHASE_PUBLISHING, step=3)


def told(phase: LongPhase, now: list[float], *seconds: float, silent: dict[str, str] | None = None) -> list[str]:
    """The lines of one publication, at seconds since its begin."""
    begun = now[0]
    phase.line(PUBLISHING, {})
    lines = []
    for each in seconds:
        now[0] = begun + each
        lines.append(phase.line(PUBLISHING, silent or {}))
    phase.line(trainer_pb2.GetStatusResponse(phase=trainer_pb2.PHASE_TRAINING, step=3), {})
    return [line for line in lines if line is not None]


def test_a_long_publication_is_told_and_again_when_it_has_doubled() -> None:
    now = [0.0]
    lines = told(LongPhase(lambda: now[0]), now, 5.0, 59.0, 60.0, 119.0, 121.0, silent={"rollout": "09:39:11"})
    assert lines == [
        "publishing the weights: 60 s so far; the rollout service has not answered since 09:39:11",
        "publishing the weights: 2 min so far; the rollout service has not answered since 09:39:11",
    ]


def test_ten_times_the_usual_is_long_and_every_publication_counts_from_its_own_begin() -> None:
    now = [0.0]
    phase = LongPhase(lambda: now[0])
    for _ in range(3):
        phase.took({"time/publish_seconds": 2.0})
    assert told(phase, now, 19.0, 20.0) == ["publishing the weights: 20 s so far"]
    assert told(phase, now, 19.0) == []


def test_the_console_asks_with_every_answer_of_the_trainer(load_with, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("headrace.cli.view.run_view.LongPhase", lambda: LongPhase(lambda: now[0]))
    view = view_of(load_with())
    view.on_status(PUBLISHING)
    now[0] = 61.0
    view.on_status(PUBLISHING)
    assert view.unread() == ["publishing the weights: 61 s so far"]
