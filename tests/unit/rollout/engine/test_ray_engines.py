"""Engines that Ray places on another machine: here a raylet of its own, with a stand-in for SGLang."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.process.linux import runs
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from tests.long_forms import whole_run
from tests.support.fakes.fake_fleet import FakeFleet, RememberedRouting
from tests.support.fakes.gloo_engine import GlooEngineProcess
from tests.support.processes.training_run import ROOT

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
