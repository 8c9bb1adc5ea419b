"""What cannot be cleaned up after an aborted publication costs the engine that it is about, and no other."""

from __future__ import annotations

import pytest
import structlog

from services.rollout.engine.fleet import EngineState
from services.rollout.publication.receiver import Receiver
from tests.support.fakes.fake_fleet import FakeFleet
from tests.unit.rollout.publication.test_receiver import PLAN


async def test_an_engine_that_cannot_be_stopped_is_said_and_the_other_goes_on(
    fakes: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(grace_seconds: float) -> None:
        raise PermissionError("not ours")

    receiver = Receiver(fakes.fleet)
    await receiver.begin(PLAN)
    monkeypatch.setattr(fakes.fake(1), "stop", stop)
    fakes.fake(1).faults["/continue_generation"] = "refuse"
    with structlog.testing.capture_logs() as said:
        await receiver.abort("p1", "the trainer changed its mind")
    assert [engine.state for engine in fakes.fleet.engines] == [EngineState.READY, EngineState.DOWN]
    assert [each["engine"] for each in said if each["event"] == "engine_not_stopped"] == ["engine-1"]
