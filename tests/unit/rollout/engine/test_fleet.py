"""Engines of a fleet: their state, their restarts, those that others start, and those that Ray places."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, FailedPrecondition, Unavailable
from headrace.job.engine_shape import EngineShape
from headrace.process.linux import runs
from headrace.rpc.net import Address, free_port
from services.rollout.engine.fleet import EngineSlot, EngineState, Fleet, FleetTiming
from services.rollout.engine.process import EngineNode, ExternalEngine
from tests.long_forms import whole_run
from tests.support.engines.contract import CONTRACT, EngineUnderTest
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import FakeFleet, RememberedRouting, fake_fleet
from tests.support.fakes.gloo_engine import GlooEngineProcess
from tests.support.processes.training_run import ROOT


async def test_every_engine_freezes_its_garbage_collection_before_it_serves(fakes: FakeFleet) -> None:
    """A publication empties its cache, which is half a second of garbage collection in an engine that did not."""
    fakes.fake(0).die()
    await fakes.until(lambda: fakes.fleet.engines[0].restarts == 1 and len(fakes.routing.urls) == 2)
    for number in (0, 1):
        calls = fakes.fake(number).calls
        assert calls.index("/freeze_gc") < calls.index("/update_weight_version")


async def test_one_missed_check_is_forgiven_and_several_in_a_row_are_not(fakes: FakeFleet) -> None:
    engine = fakes.fleet.engines[0]
    fake = fakes.fake(0)
    seen = fake.calls.count("/model_info")
    fake.faults["/model_info"] = "hang"
    await fakes.until(lambda: fake.calls.count("/model_info") > seen)
    fake.faults.clear()
    await fakes.until(lambda: fake.calls.count("/model_info") > seen + 6)
    assert (engine.restarts, engine.state) == (0, EngineState.READY)
    fake.faults["/model_info"] = "hang"
    await fakes.until(lambda: engine.restarts == 1)


async def test_an_engine_that_ends_again_and_again_stays_down_and_says_why() -> None:
    async with fake_fleet(max_restarts=2) as fakes:
        one, other = fakes.fleet.engines
        lost = asyncio.create_task(fakes.fleet.lost())
        for restarts in (1, 2):
            fakes.fake(0).die()
            await fakes.until(lambda count=restarts: (one.restarts, one.state) == (count, EngineState.READY))
        fakes.fake(0).die()
        await fakes.until(lambda: one.state is EngineState.QUARANTINED)
        assert "ended with exit code -9" in one.trouble
        assert (fakes.routing.urls, [e.engine_id for e in fakes.fleet.alive()]) == ({other.url}, ["engine-1"])
        await fakes.fleet.switch_to(7)  # a version that it will never have
        assert (one.state, lost.done()) == (EngineState.QUARANTINED, False)
        for restarts in (0, 1, 2):
            await fakes.until(lambda count=restarts: (other.restarts, other.state) == (count, EngineState.STALE))
            fakes.fake(1).die()
        with pytest.raises(Unavailable, match=r"every engine ended too often:\nengine-0: ended with (.|\n)*engine-1: "):
            await lost


TIMING = FleetTiming(
    start_seconds=60, check_interval_seconds=0.01, check_timeout_seconds=0.2, missed_checks=3, max_restarts=5
)


def address_of(engine: FakeEngine) -> Address:
    return Address.parse(engine.url.removeprefix("http://"))


@pytest.fixture
async def others() -> AsyncIterator[FakeEngine]:
    """A server that runs before and after the fleet."""
    engine = FakeEngine()
    await engine.start(seconds=60)
    yield engine
    await engine.stop()


async def test_it_has_unknown_weights_until_it_is_given_some_and_is_left_running(others: FakeEngine) -> None:
    routing = RememberedRouting()
    external = [ExternalEngine(address_of(others), 1)]
    fleet = Fleet(1, 1, lambda number: external[number], routing, TIMING, begins_with_checkpoint=False)
    await fleet.start()
    (engine,) = fleet.engines
    assert engine.state is EngineState.STALE
    assert routing.urls == set()
    assert fleet.alive() == [engine]
    await fleet.switch_to(0)
    await fleet.serve(engine, 0)
    assert (engine.state, routing.urls) == (EngineState.READY, {others.url})
    await fleet.stop()
    assert "/abort_request" in others.calls, "the requests of this service are ended"
    assert others.exit_code is None


async def test_one_that_goes_away_is_tried_again_and_is_not_trusted_when_it_comes_back(others: FakeEngine) -> None:
    routing = RememberedRouting()
    fleet = Fleet(1, 1, lambda _: ExternalEngine(address_of(others), 1), routing, TIMING, begins_with_checkpoint=False)
    await fleet.start()
    (engine,) = fleet.engines
    await fleet.switch_to(3)
    await fleet.serve(engine, 3)
    others.faults["/model_info"] = others.faults["/server_info"] = "hang"
    until = FakeFleet(fleet, routing).until
    await until(lambda: engine.state is not EngineState.READY)
    assert routing.urls == set()
    others.faults.clear()
    await until(lambda: engine.state is EngineState.STALE)
    assert engine.restarts >= 1
    await fleet.stop()


async def test_an_engine_of_another_size_is_refused_and_one_that_is_not_there_is_waited_for(
    others: FakeEngine,
) -> None:
    with pytest.raises(FailedPrecondition, match="has 1 ranks, and rollout_num_gpus_per_engine is 2"):
        await ExternalEngine(address_of(others), 2).start(seconds=60)
    nobody = ExternalEngine(Address("127.0.0.1", free_port()), 1)
    with pytest.raises(Unavailable, match="did not answer within 0.6 s .* take its address out"):
        await nobody.start(seconds=0.6)
    await nobody.stop()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("127.0.0.1:1", "127.0.0.1:1"), "has an address twice"),
        (("127.0.0.1:1", "--rollout-num-gpus", "3"), "1 engines of 1 have 1; leave one of them out"),
        (("10.0.0.7:1", "--update-weight-transport", "ipc"), "10.0.0.7:1 may be another"),
        (("127.0.0.1:1", "--debug-rollout-only"), "nothing would give them"),
    ],
)
def test_what_cannot_be_asked_of_them_is_refused(load_with, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_with("--rollout-external-engine-addrs", *flags)
    assert said in refused.value.message


@pytest.mark.parametrize("promise", CONTRACT)
async def test_the_fake_engine_keeps_the_contract(fakes: FakeFleet, promise: str) -> None:
    fakes.fake(0).weights |= {"model.layers.0.norm.weight": "zero", "model.norm.weight": "last"}
    await CONTRACT[promise](EngineUnderTest(fakes.fleet.engines[0], fakes.fleet.weights))


has_ray = importlib.util.find_spec("ray") is not None


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A head that has room for nothing, and a node for two engines."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    memory = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
    cluster.add_node(num_cpus=2, **memory)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def stand_in(log_dir: Path, host: str) -> GlooEngineProcess:
    """Runs in the actor; what it is told lies in a file."""
    process = GlooEngineProcess(log_dir / f"engine-{os.getpid()}.log")
    (log_dir / f"host-{os.getpid()}").write_text(host)
    return process


def pid_in(log_dir: Path, known: set[str]) -> int:
    """The process of the actor that is new."""
    (new,) = {path.name.removeprefix("host-") for path in log_dir.glob("host-*")} - known
    known.add(new)
    return int(new)


@pytest.mark.skipif(not has_ray, reason="ray is not installed")
@whole_run
async def test_engines_start_on_another_machine_are_watched_and_end_with_the_fleet(
    cluster: object, tmp_path: Path
) -> None:
    from services.rollout.engine.ray_engine import RayEngine, join_cluster

    assert join_cluster() is False, "no GPUs are here"
    timing = FleetTiming(start_seconds=60, check_interval_seconds=0.2, max_restarts=1)
    fleet = Fleet(1, 1, lambda _: RayEngine(partial(stand_in, tmp_path), 0), RememberedRouting(), timing)
    fakes, known = FakeFleet(fleet, RememberedRouting()), set[str]()
    await fleet.start()
    try:
        (engine,) = fleet.engines
        first = pid_in(tmp_path, known)
        assert first != os.getpid()
        assert engine.state is EngineState.READY
        os.kill(first, signal.SIGKILL)  # the actor, as when its machine is lost
        await fakes.until(lambda: (engine.restarts, engine.state) == (1, EngineState.READY))
        assert "its actor or its machine was lost" in engine.trouble
        second = pid_in(tmp_path, known)
        added = fleet.add(1)
        await fakes.until(lambda: added.state is EngineState.READY)
        third = pid_in(tmp_path, known)
        await fleet.retire(added, drain_seconds=0)
        await fakes.until(lambda: not runs(third))
    finally:
        await fleet.stop()
    await fakes.until(lambda: not runs(second))


def node_stand_in(log_dir: Path, node: EngineNode, host: str) -> GlooEngineProcess:
    (log_dir / f"node-{os.getpid()}").write_text(f"{node.rank} {node.meets_at}")
    return GlooEngineProcess(log_dir / f"engine-{os.getpid()}.log")


@pytest.mark.skipif(not has_ray, reason="ray is not installed")
@whole_run
async def test_an_engine_of_two_machines_is_lost_with_one_of_them_and_comes_back_on_two(
    cluster: Any, tmp_path: Path
) -> None:
    from services.rollout.engine.ray_engine import RayNodes, join_cluster

    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    join_cluster()

    def factory(_: int) -> RayNodes:
        return RayNodes(lambda node: partial(node_stand_in, tmp_path, node), 2, 0)

    def nodes() -> dict[int, tuple[str, str]]:
        return {
            int(path.name.removeprefix("node-")): tuple(path.read_text().split()) for path in tmp_path.glob("node-*")
        }

    timing = FleetTiming(start_seconds=60, check_interval_seconds=0.2, max_restarts=1)
    fleet = Fleet(1, lambda _: EngineSlot(EngineShape(2, nodes=2)), factory, RememberedRouting(), timing)
    await fleet.start()
    try:
        (engine,) = fleet.engines
        first = nodes()
        assert sorted(rank for rank, _ in first.values()) == ["0", "1"]
        assert len({meets_at for _, meets_at in first.values()}) == 1
        os.kill(next(pid for pid, (rank, _) in first.items() if rank == "1"), signal.SIGKILL)
        await FakeFleet(fleet, RememberedRouting()).until(
            lambda: (engine.restarts, engine.state) == (1, EngineState.READY)
        )
        assert "on machine 1" in engine.trouble
        assert not any(runs(pid) for pid in first), "the other machine's process ended with it"
        assert sorted(rank for pid, (rank, _) in nodes().items() if pid not in first) == ["0", "1"]
    finally:
        await fleet.stop()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "starts engines in a cluster that runs: start one with `ray start`, and set RAY_ADDRESS"),
        (("--rollout-external-engine-addrs", "10.0.0.7:1"), "those engines are started elsewhere"),
        (("--update-weight-transport", "disk"), "disk with engines that Ray places: the run's folder may be this mach"),
    ],
)
def test_rollout_placement_ray_is_refused_where_it_cannot_be(
    load_with, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=said):
        load_with("--rollout-placement", "ray", *flags)
