"""Whoever starts the ranks: they meet, they know their places, and when one dies all end within seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.job.schema.placement import PlacementSection
from headrace.job.schema.run import ModelSection
from headrace.launch.ranks.slurm import first_host, task_environment
from headrace.launch.specs import starter
from headrace.process.linux import runs
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder
from tests.long_forms import ALL, whole_run
from tests.support.processes.listening import open_to_others
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
PLACEMENTS = [
    ("local", 1, 3),
    ("slurm", 2, 1),
    *([("slurm", 1, 2), pytest.param("ray", 2, 1, marks=needs_ray)] if ALL else []),
]
EXIT_CODES = {"slurm": {137, 143}}
"""Other than SIGKILL's. srun says the highest: 143 when it ended rank 0 before that had noticed."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run's folder, on a machine with an srun."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").symlink_to(ROOT / "tests" / "support" / "fakes" / "srun.py")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = RunFolder(tmp_path / "run")
    found.logs.mkdir(parents=True)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("placement", "nodes", "per_node"), PLACEMENTS)
def test_ranks_meet_and_end_together(folder: RunFolder, placement: str, nodes: int, per_node: int) -> None:
    program = [sys.executable, str(ROOT / "tests" / "support" / "ranks" / "rank_program.py"), str(folder.path)]
    ended = subprocess.run(
        [*starter(job(placement, nodes, per_node).placement, folder), *program],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip

    world_size = nodes * per_node
    told = ended.stdout + ended.stderr + "".join(log.read_text() for log in folder.logs.glob("*.log"))
    total = world_size * (world_size + 1) / 2
    for rank in range(world_size):
        place = [f"{total:g}", rank, rank % per_node, world_size, per_node]
        assert (folder.path / f"rank-{rank}").read_text() == " ".join(map(str, place)), told
        if nodes == 1:
            listens = json.loads((folder.path / f"listening-{rank}").read_text())
            assert listens
            assert open_to_others(listens) == []
    assert ended.returncode in EXIT_CODES.get(placement, {137}), told
    assert "rank 1 says its last words" in told
    if placement in ("local", "ray"):
        assert "rank 1 ended with signal 9" in ended.stderr
        assert "rank 1 says its last words" in ended.stderr
    assert not list(folder.logs.glob(".rendezvous*.part"))


@needs_ray
@whole_run
def test_what_a_rank_has_started_ends_with_its_actor(folder: RunFolder) -> None:
    """Ray would end an actor's own children, and nothing below those."""
    program = ["bash", "-c", f"sleep 1000 & echo $! > {folder.path}/child-$RANK; wait"]
    with subprocess.Popen([*starter(job("ray", 2, 1).placement, folder), *program], cwd=ROOT) as ranks:
        while len(children := [file.read_text() for file in folder.path.glob("child-*")]) < 2 or "" in children:
            assert ranks.poll() is None
            time.sleep(0.05)
        ranks.kill()
    while any(runs(int(child)) for child in children):
        time.sleep(0.05)


def test_an_exit_code_is_passed_on_with_the_ranks_last_lines(folder: RunFolder) -> None:
    code = "import os, sys; print('no such model'); sys.exit(2 if os.environ['RANK'] == '1' else 76)"
    command = [*starter(job("local", 1, 2).placement, folder), sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "rank 1 ended with exit code 2" in ended.stderr
    assert "no such model" in ended.stderr


def test_several_machines_need_slurm_or_ray_or_a_place_to_meet(folder: RunFolder) -> None:
    with refused(ConfigError, "actor_num_nodes 2", "--master-addr"):
        starter(job("local", 2, 1).placement, folder)


@pytest.mark.parametrize(("node_rank", "code"), [(0, 76), (1, 75)])
def test_ranks_that_the_first_machine_has_left_start_again_and_wait_for_it(
    folder: RunFolder, node_rank: int, code: int
) -> None:
    """76 counts as a death of this machine's own; 75 as the absence of somebody else (docs/operations.md)."""
    placement = job("local", 2, 1, master_addr="127.0.0.2", node_rank=node_rank).placement
    command = [*starter(placement, folder), sys.executable, "-c", "raise SystemExit(76)"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == code


@pytest.mark.ranks
def test_machines_that_start_their_own_ranks_meet_at_the_master_and_end_together(folder: RunFolder) -> None:
    """Both are this machine, at two addresses of loopback. One gets its place from flags, one from torchrun's names."""
    program = [sys.executable, str(ROOT / "tests" / "support" / "ranks" / "rank_program.py"), str(folder.path)]
    port = str(free_port("127.0.0.2"))
    meeting = {"master_addr": "127.0.0.2", "master_port": int(port)}
    exported = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": port, "NODE_RANK": "1"}
    first = starter(job("local", 2, 1, **meeting, node_rank=0).placement, folder)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in exported.items():
            environment.setenv(name, value)
        second = starter(job("local", 2, 1).placement, folder)
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*words, *program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
            for words in (second, first)
        ]
        told = [process.communicate(timeout=240)[0] for process in started]
    for rank in range(2):
        assert (folder.path / f"rank-{rank}").read_text() == f"3 {rank} 0 2 1", told
    assert [process.returncode for process in started] == [137, 76], told
    assert "rank 1 says its last words" in told[0]


def test_slurm_outside_of_an_allocation_is_refused(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    with refused(ConfigError, "deploy/slurm/train.sbatch"):
        starter(job("slurm", 1, 1).placement, folder)
    monkeypatch.setenv("PATH", "/nowhere")
    with refused(ConfigError, "srun"):
        starter(job("slurm", 1, 1).placement, folder)


def test_a_task_of_slurm_has_its_place_and_the_first_machine_where_the_environment_names_it() -> None:
    slurm = {
        "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2",
        "SLURM_STEP_NODELIST": "gpu[7-8]",
    }  # fmt: skip
    found = task_environment(slurm, "/shared/.rendezvous-1")
    place = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert found == place | {"HEADRACE_RENDEZVOUS": "/shared/.rendezvous-1", "MASTER_ADDR": "gpu7"}
    assert "MASTER_ADDR" not in task_environment(slurm | {"MASTER_ADDR": "10.0.0.7"}, "/shared/.rendezvous-1")


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a,b", "a"),
        ("r1-n[11,12]", "r1-n11"),
        ("x.y.z[1-2]", "x.y.z1"),
    ],
)
def test_the_first_host_of_a_node_list(node_list: str, first: str) -> None:
    assert first_host(node_list) == first


def job(placement: str, nodes: int, per_node: int, **meeting: object) -> Job:
    place = PlacementSection.model_validate(
        {"placement": placement, "actor_num_nodes": nodes, "actor_num_gpus_per_node": per_node, **meeting}
    )
    return Job(model=ModelSection(hf_checkpoint=Path("/none")), placement=place)
