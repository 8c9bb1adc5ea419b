"""Engines on the machines of a Slurm allocation, with a stand-in for its programs on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError, Unavailable
from headrace.job.schema.job import Job
from services.rollout.engine import launch
from services.rollout.engine.arguments import EngineOptions, NodeOptions
from services.rollout.engine.process import NodesProcess
from services.rollout.engine.slurm_engine import Allocation
from services.rollout.fleet_build import capacity, sglang_factory
from tests.unit.rollout.engine.test_startup import ENGINE

SCONTROL = """#!/bin/sh
echo "NodeName=n1 Arch=x86_64 CPUTot=2 NodeAddr=127.0.0.1 NodeHostName=one State=ALLOCATED"
echo "NodeName=n2 Arch=x86_64 CPUTot=2 NodeAddr=127.0.0.2 NodeHostName=two State=ALLOCATED"
"""
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do words="$words $1"; shift; done
echo "$words $2 $3 " >> "$HEADRACE_TEST_SRUN"
exec "$@"
"""


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What srun was asked is in the file."""
    programs, asked = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    monkeypatch.setenv("HEADRACE_TEST_SRUN", str(asked))
    return asked


def job(**placement: object) -> Job:
    engines = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "rollout_placement": "slurm"}
    sections = {"model": {"hf_checkpoint": "m"}, "placement": engines | placement, "sglang": {"nnodes": 2}}
    return Job.model_validate(sections)


async def test_each_machine_of_an_engine_is_started_there_and_ends_with_it(
    allocation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = dict[int, tuple[EngineOptions, NodeOptions]]()

    def command(options: EngineOptions, *, engine: int, port: int, node: NodeOptions) -> list[str]:
        started[node.rank] = (options, node)
        return [sys.executable, "-c", ENGINE.replace("127.0.0.1", options.host), str(port), "serves"]

    monkeypatch.setattr(launch, "command", command)
    engine = sglang_factory(job(), tmp_path, has_accelerator=True)(0)
    assert isinstance(engine, NodesProcess)
    await engine.start(seconds=50.0)
    try:
        assert engine.url.startswith("http://127.0.0.1:")
        assert [started[rank][0].host for rank in (0, 1)] == ["127.0.0.1", "127.0.0.2"]
        assert started[0][1].meets_at == started[1][1].meets_at
        assert started[0][1].meets_at.startswith("127.0.0.1:")
        asked = sorted(allocation.read_text().splitlines())
    finally:
        await engine.stop()
    assert all(node.exit_code is not None for node in engine.nodes)
    for line, machine in zip(asked, ("n1", "n2"), strict=True):
        assert f"--nodelist={machine} --overlap" in line
        assert "CUDA_VISIBLE_DEVICES=" + ("1 " if machine == "n1" else "0 ") in line, "GPU 0 of n1 is the trainer's"


def test_an_allocation_without_room_is_refused_and_so_is_none(
    allocation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="engine 0 on machine 2 of 2 wants 2 GPUs"):
        sglang_factory(job(rollout_num_gpus=4, rollout_num_gpus_per_engine=4), tmp_path, has_accelerator=True)
    assert Allocation.here(8).machines[1].devices[-1].name == "7"
    (tmp_path / "bin/scontrol").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(Unavailable, match="scontrol --oneliner show node"):
        Allocation.here(None)
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    with pytest.raises(ConfigError, match="this process is not in one"):
        Allocation.here(None)


def test_a_fleet_in_an_allocation_has_the_engines_that_were_planned() -> None:
    assert capacity(job(), has_accelerator=False).num_slots == 1
