"""ScaleFleet as a client and a person at a terminal see it, on a service of fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.cli.main import main
from headrace.cli.view.lines import Coming
from headrace.client.rollout import RolloutClient
from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.job.schema.job import Job
from headrace.rpc.server import RpcServer, Service
from services.rollout.build import rollout_service
from services.rollout.engine.fleet import EngineState
from services.rollout.fleet_build import capacity
from services.rollout.server import RolloutServicer
from services.rollout.service import RolloutParts
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE, RememberedRouting, fake_fleet
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
    name = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    server = RpcServer("rollout", "127.0.0.1:0", [Service(RolloutServicer(parts), add, name)])
    await server.start()
    try:
        yield server.address, parts
    finally:
        await server.stop(0.1)
        await service.stop()


async def test_a_client_scales_the_fleet_and_sees_engines_come_and_go(tmp_path: Path) -> None:
    async with served(tmp_path) as (address, _), RolloutClient(address) as client:
        reply = await client.scale_fleet(2, drain_seconds=0)
        assert (reply.wanted_before, reply.wanted_engines, list(reply.coming_ids)) == (1, 2, ["engine-1"])
        assert (await client.get_fleet()).wanted_engines == 2
        async with asyncio.timeout(60):
            while {e.state for e in (await client.get_fleet()).engines} != {rollout_pb2.ENGINE_STATE_READY}:
                await asyncio.sleep(0.01)  # another party's state
        assert list((await client.scale_fleet(1, drain_seconds=0)).leaving_ids) == ["engine-1"]
        async with asyncio.timeout(60):
            while len((await client.get_fleet()).engines) > 1:
                await asyncio.sleep(0.01)  # another party's state


async def test_rollout_max_engines_is_what_a_fleet_may_grow_to(tmp_path: Path) -> None:
    async with served(tmp_path) as (address, parts), RolloutClient(address) as client:
        with pytest.raises(InvalidArgument, match="num_engines 4 is above rollout_max_engines 3: scale to 3"):
            await client.scale_fleet(4)
        for wrong in (-1.0, float("nan"), 1e9):
            with pytest.raises(InvalidArgument, match="drain_seconds"):
                await client.scale_fleet(2, drain_seconds=wrong)
        with pytest.raises(InvalidArgument, match="num_engines"):
            await client.scale_fleet((1 << 32) - 1)
        assert len(parts.fleet.engines) == parts.scaler.wanted == 1
        await client.scale_fleet(MOST)
        assert len(parts.fleet.engines) == MOST


async def test_engines_that_are_started_elsewhere_are_scaled_there() -> None:
    job = Job.model_validate(
        {"model": {"hf_checkpoint": "m"}, "placement": {"rollout_external_engine_addrs": ["10.0.0.7:1"]}}
    )
    with pytest.raises(FailedPrecondition, match="start or end them there"):
        await capacity(job, has_accelerator=False).require(2, [])
    on_gpus = Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": {"rollout_num_gpus": 4}})
    assert (capacity(on_gpus, has_accelerator=True).num_slots, capacity(on_gpus, has_accelerator=False).num_slots) == (
        4,
        None,
    )


async def test_a_person_sees_how_engines_come_and_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(tmp_path) as (address, parts):
        for words, wanted in (("3", 3), ("3", 3), ("1 --drain-seconds 0", 1)):
            typed = ["rollout", "scale", *words.split(), "--rollout-address", address]
            assert await asyncio.to_thread(main, typed) == 0
            assert [e.state for e in parts.fleet.engines] == [EngineState.READY] * wanted
    printed = capsys.readouterr().out
    assert "1 -> 3 engines; engine-1, engine-2 to come\n" in printed
    assert "  engine-2 serves version 0\n" in printed
    assert "3 -> 3 engines; nothing to change\n" in printed
    assert "3 -> 1 engines; engine-2, engine-1 to leave\n" in printed
    assert "  engine-1 has ended\n" in printed
    assert "1 engine serves, until the rollout service starts again: then it has the job's number\n" in printed


class ScriptedFleet(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers with these looks at the fleet, one after the other, and then with the last of them."""

    def __init__(self, looks: Sequence[Sequence[rollout_pb2.Engine]]) -> None:
        self._looks = list(looks)

    async def GetFleet(self, request: Any, context: Any) -> rollout_pb2.GetFleetResponse:
        engines = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        return rollout_pb2.GetFleetResponse(
            engines=engines, wanted_engines=len(self._looks[-1]), policy_version=6, publication_id="step-7"
        )

    async def ScaleFleet(self, request: Any, context: Any) -> rollout_pb2.ScaleFleetResponse:
        return rollout_pb2.ScaleFleetResponse(wanted_before=1, wanted_engines=request.num_engines)


def engine_of(number: int, state: str, version: int = 0) -> rollout_pb2.Engine:
    return rollout_pb2.Engine(
        engine_id=f"engine-{number}",
        state=rollout_pb2.EngineState.Value(f"ENGINE_STATE_{state}"),
        policy_version=version,
    )


@pytest.mark.parametrize(
    "ways",
    [
        [("STARTING", 0), ("STALE", 0), ("UPDATING", 0), ("READY", 7)],
        [("UPDATING", 0), ("UPDATING", 0), ("READY", 1)],
        [("STARTING", 0), ("UPDATING", 0), ("DOWN", 0), ("STALE", 0), ("UPDATING", 0), ("READY", 12)],
        [("RELEASED", 0), ("STALE", 3), ("UPDATING", 3), ("READY", 4)],
    ],
)
async def test_an_engine_that_joins_in_a_publication_serves_nothing_before_its_commit(
    ways: Sequence[tuple[str, int]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old engine takes part in the publication, too: it serves its version meanwhile."""
    monkeypatch.setattr("headrace.cli.commands.live._POLL_SECONDS", 0.0)
    last = ways[-1][1]
    looks = [[engine_of(0, "READY", last - 1)]]
    looks += [[engine_of(0, "UPDATING", last - 1), engine_of(1, state, version)] for state, version in ways[:-1]]
    looks += [[engine_of(0, "READY", last), engine_of(1, "READY", last)]]
    name = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    server = RpcServer("rollout", "127.0.0.1:0", [Service(ScriptedFleet(looks), add, name)])
    await server.start()
    try:
        typed = ["rollout", "scale", "2", "--rollout-address", server.address]
        assert await asyncio.to_thread(main, typed) == 0
    finally:
        await server.stop(0.1)
    printed = capsys.readouterr().out
    assert [line.split("  ")[-1] for line in printed.splitlines() if "serves version" in line] == [
        f"engine-1 serves version {last}"
    ]
    assert "engine-1 is being given weights" in printed


@pytest.mark.parametrize("version", [1, 2, 40])
async def test_an_engine_that_started_while_another_version_was_committed_waits_for_weights(version: int) -> None:
    """Its checkpoint's weights were the served ones when it asked for its place in routing."""
    async with fake_fleet(count=1) as rig:
        fleet, (engine,) = rig.fleet, rig.fleet.engines
        add, engine.state = rig.routing.add, EngineState.STARTING

        async def committed_meanwhile(url: str) -> None:
            await add(url)
            await fleet.switch_to(version)

        rig.routing.add = committed_meanwhile  # type: ignore[method-assign]
        await fleet.serve(engine, 0, is_initial=True)
        assert (engine.state, engine.url in rig.routing.urls) == (EngineState.STALE, False)


def test_what_a_person_types_wrong_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "scael", "3"]) == 2
    assert "unknown command rollout scael: did you mean scale?" in capsys.readouterr().err
    for words in (["0"], ["two"], ["2", "--drain-seconds", "nan"], ["2", "--wait-seconds", "-1"]):
        assert main(["rollout", "scale", *words]) == 2


def test_engines_that_wait_or_stay_down_are_said_with_what_helps() -> None:
    def engine(number: int, state: str, **more: Any) -> rollout_pb2.Engine:
        return rollout_pb2.Engine(
            engine_id=f"engine-{number}", state=rollout_pb2.EngineState.Value(f"ENGINE_STATE_{state}"), **more
        )

    coming = Coming([engine(0, "READY")])
    starting = [engine(0, "UPDATING"), engine(1, "STARTING")]
    assert list(coming.news(starting)) == ["engine-1 starts and loads the model"]
    assert coming.end(starting) is None
    stale = [engine(0, "READY"), engine(1, "STALE")]
    (line,) = coming.news(stale)
    assert "waits for weights: the trainer gives it those that are served when it next waits for a batch" in line
    assert coming.end(stale) is None
    down = [engine(0, "READY"), engine(1, "QUARANTINED", trouble="exit code -9;\nKilled")]
    assert list(coming.news(down)) == ["engine-1 ended too often and stays down: exit code -9; Killed"]
    assert coming.end(down) == ("1 of 2 engines serve: see the log of engine-1", 1)
