"""ScaleFleet as a client and a person at a terminal see it, on a service of fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace.cli.main import main
from headrace.job.schema.job import Job
from services.rollout.build import rollout_service
from services.rollout.engine.fleet import EngineState
from services.rollout.server import RolloutServicer
from services.rollout.service import RolloutParts
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE, RememberedRouting, fake_fleet, served_rollout
from tests.support.models.tiny_model import make_tiny_qwen3

MOST = 3


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, RolloutParts]]:
    """A rollout service of one engine, without its router and its producers, and its address."""
    make_tiny_qwen3(folder / "model")
    job = Job.model_validate(
        {
            "model": {"hf_checkpoint": folder / "model"},
            "services": {"buffer_address": "127.0.0.1:1", "reward_address": "127.0.0.1:2"},
            "placement": {"rollout_max_engines": MOST},
        }
    )
    service = rollout_service(job, lambda _: FakeEngine(WIRE), folder, CollectorRegistry())
    parts = service.parts
    parts.fleet._routing = RememberedRouting()
    await parts.fleet.start()
    async with served_rollout(RolloutServicer(parts)) as address:
        yield address, parts
    await service.stop()


async def test_a_person_sees_how_engines_come_and_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(tmp_path) as (address, parts):
        for words, wanted in (("3", 3), ("1 --drain-seconds 0", 1)):
            typed = ["rollout", "scale", *words.split(), "--rollout-address", address]
            assert await asyncio.to_thread(main, typed) == 0
            assert [e.state for e in parts.fleet.engines] == [EngineState.READY] * wanted
    printed = capsys.readouterr().out
    assert "1 -> 3 engines; engine-1, engine-2 to come\n" in printed
    assert "  engine-2 serves version 0\n" in printed
    assert "3 -> 1 engines; engine-2, engine-1 to leave\n" in printed


async def test_an_engine_that_started_while_another_version_was_committed_waits_for_weights() -> None:
    """Its checkpoint's weights were the served ones when it asked for its place in routing."""
    async with fake_fleet(count=1) as rig:
        fleet, (engine,) = rig.fleet, rig.fleet.engines
        add, engine.state = rig.routing.add, EngineState.STARTING

        async def committed_meanwhile(url: str) -> None:
            await add(url)
            await fleet.switch_to(2)

        rig.routing.add = committed_meanwhile  # type: ignore[method-assign]
        await fleet.serve(engine, 0, is_initial=True)
        assert (engine.state, engine.url in rig.routing.urls) == (EngineState.STALE, False)
