"""Trainer and engines of a job get GPUs of their own, on a machine whose nvidia-smi is a script that names eight."""

from __future__ import annotations

import os
import stat
from itertools import chain
from pathlib import Path

import pytest

from headrace.cli.view.plan import plan
from headrace.devices import RANK_DEVICES, rank_devices
from headrace.errors import ConfigError
from headrace.job.rules.machines import device_plan
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.launch.launcher import Launcher
from headrace.launch.ranks.slurm import task_environment
from headrace.launch.specs import gpu_environments

ALL = ("buffer", "reward", "rollout", "trainer")
ROWS = "".join(f"{k}, GPU-{k}{k}{k}{k}0000-0000-0000-0000-000000000000, 00000000:{k:02X}:00.0\\n" for k in range(8))


@pytest.fixture
def eight_gpus(tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "bin/nvidia-smi"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\nprintf '{ROWS}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def job_of(**placement: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": placement})


def visible(job: Job, services: tuple[str, ...] = ALL, **given: str) -> dict[str, str]:
    found = gpu_environments(job, services, given)
    return {name: environment["CUDA_VISIBLE_DEVICES"] for name, environment in found.items()}


@pytest.mark.usefixtures("eight_gpus")
def test_the_documents_four_and_four_are_disjoint(load_with) -> None:
    job = job_of(actor_num_gpus_per_node=4, rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    assert visible(job) == {"trainer": "0,1,2,3", "rollout": "4,5,6,7"}
    assert visible(job, ("rollout",)) == {"rollout": "4,5,6,7"}, "also when it is started by itself"
    flags = ("--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2")
    assert ("GPUs", "trainer GPU 0-3; engine 0 GPU 4-5; engine 1 GPU 6-7") in plan(load_with(*flags))
    assert gpu_environments(job, ALL, {})["trainer"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.usefixtures("eight_gpus")
def test_with_colocate_over_two_machines_each_services_engines_are_on_the_ranks_gpus_of_its_machine(load_with) -> None:
    flags = ("--colocate", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--insecure")
    flags += ("--rollout-address", "10.0.0.7:7002,10.0.0.8:7002", "--buffer-address", "10.0.0.7:7001")
    flags += ("--master-addr", "10.0.0.7", "--trainer-address", "10.0.0.7:7004")
    job = load_with(*flags, "--update-weight-disk-path", "/shared/weights", "--rollout-num-gpus-per-engine", "2")
    assert (job.placement.rollout_num_gpus, job.placement.num_engines) == (4, 2)
    assert job.publish.update_weight_transport == "disk"
    assert visible(job, ("trainer",)) == {"trainer": "0,1,2,3"}
    assert visible(job, ("rollout",)) == {"rollout": "0,1,2,3"}


@pytest.mark.usefixtures("eight_gpus")
def test_what_a_person_exports_bounds_a_run_and_is_for_one_service_alone(monkeypatch) -> None:
    job = job_of(actor_num_gpus_per_node=1, rollout_num_gpus=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,2")
    assert visible(job, CUDA_VISIBLE_DEVICES="6,2") == {"trainer": "2", "rollout": "6"}
    assert visible(job, ("rollout",), CUDA_VISIBLE_DEVICES="6,2") == {"rollout": "2"}


@pytest.mark.usefixtures("eight_gpus")
def test_num_gpus_per_node_bounds_what_is_used() -> None:
    job = job_of(actor_num_gpus_per_node=2, rollout_num_gpus=2, num_gpus_per_node=4)
    assert visible(job) == {"trainer": "0,1", "rollout": "2,3"}
    with pytest.raises(ConfigError, match="the job wants 1 x 4 for the trainer and 2 for 2 engines"):
        visible(job_of(actor_num_gpus_per_node=4, rollout_num_gpus=2, num_gpus_per_node=4))
    with pytest.raises(ConfigError, match="num_gpus_per_node 16 is more than there is"):
        visible(job_of(num_gpus_per_node=16))


def test_a_check_for_other_machines_plans_with_num_gpus_per_node() -> None:
    job = job_of(actor_num_nodes=2, actor_num_gpus_per_node=4, rollout_num_gpus=4, num_gpus_per_node=8)
    found = device_plan(job, Scope(ALL, "--elsewhere"))
    assert found is not None
    assert [share.visible for share in (*found.trainer, *chain(*found.engines))] == ["0,1,2,3", "4", "5", "6", "7"]
    assert device_plan(job_of(), Scope(ALL, "--elsewhere")) is None


def test_ranks_of_slurm_take_the_trainers_gpus_of_their_machine_only_beside_engines() -> None:
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    slurm |= {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert "CUDA_VISIBLE_DEVICES" not in task_environment(slurm, "meeting")
    assert task_environment(slurm | {RANK_DEVICES: "1"}, "meeting")["CUDA_VISIBLE_DEVICES"] == "1"
    assert rank_devices({}) == {}


@pytest.mark.usefixtures("eight_gpus")
def test_each_of_several_rollout_services_has_gpus_of_its_own(load_with, tmp_path: Path) -> None:
    flags = ("--rollout-services", "2", "--rollout-num-gpus", "2", "--actor-num-gpus-per-node", "4")
    job = load_with("--run-dir", str(tmp_path / "runs"), *flags)
    found = {each.name: each.environment.get("CUDA_VISIBLE_DEVICES") for each in Launcher(job, ALL, print)._specs}
    assert [found[name] for name in ("trainer", "rollout-0", "rollout-1")] == ["0,1,2,3", "4,5", "6,7"]


@pytest.mark.usefixtures("eight_gpus")
def test_engines_of_groups_have_as_many_as_their_group_says() -> None:
    groups = [
        {"name": "large", "num_engines": 1, "num_gpus": 4, "num_gpus_per_engine": 4},
        {"name": "small", "num_engines": 2, "num_gpus": 2, "num_gpus_per_engine": 1},
    ]
    found = device_plan(job_of(actor_num_gpus_per_node=2, rollout_num_gpus=6, engine_groups=groups), Scope(ALL))
    assert found is not None
    assert [share.visible for share in chain(*found.engines)] == ["2,3,4,5", "6", "7"]
