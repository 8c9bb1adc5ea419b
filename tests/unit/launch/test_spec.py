"""What a job says about a service's start and restarts is how it is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.job.rules.machines import check_metrics_port
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.services import ServicesSection
from headrace.launch.specs import SERVICES, spec
from headrace.run_folder import RunFolder
from services.rollout.engine import arguments
from services.rollout.fleet_build import engine_options

ADDRESSES = {
    f"{name}_address": f"127.0.0.1:70{number}"
    for number, name in ((10, "buffer"), (11, "rollout"), (12, "reward"), (13, "trainer"))
}


def job_of(folder: Path, **placement: object) -> Job:
    services = {**ADDRESSES, "start_timeout_seconds": 12.0}
    sections = {"model": {"hf_checkpoint": "m"}, "run": {"run_dir": str(folder)}}
    return Job.model_validate({**sections, "services": services, "placement": placement})


@pytest.mark.parametrize("service", ["buffer", "rollout", "reward", "trainer"])
def test_a_service_has_start_timeout_seconds_to_answer(tmp_path: Path, service: str) -> None:
    job = job_of(tmp_path)
    assert spec(job, service, RunFolder(tmp_path)).start_seconds == 12.0


def test_a_trainer_is_started_again_with_use_fault_tolerance_alone(tmp_path: Path) -> None:
    job = job_of(tmp_path, use_fault_tolerance=True)
    assert spec(job, "trainer", RunFolder(tmp_path)).max_restarts == 5
    assert spec(job_of(tmp_path), "trainer", RunFolder(tmp_path)).no_restart is not None


def test_a_service_listens_at_listen_host_and_is_known_by_its_address(tmp_path: Path) -> None:
    services = {**ADDRESSES, "buffer_address": "buffer.example:7010", "listen_host": "0.0.0.0"}  # noqa: S104
    job = Job.model_validate({"model": {"hf_checkpoint": "m"}, "run": {"run_dir": str(tmp_path)}, "services": services})
    found = spec(job, "buffer", RunFolder(tmp_path))
    assert found.command[list(found.command).index("--address") + 1] == "0.0.0.0:7010"
    assert found.address == "buffer.example:7010"
    assert str(found.listens_at.from_here) == "127.0.0.1:7010"


def test_metrics_port_is_on_the_host_on_which_the_service_listens(tmp_path: Path) -> None:
    services = {**ADDRESSES, "listen_host": "0.0.0.0", "metrics_port": 9464}  # noqa: S104
    job = Job.model_validate({"model": {"hf_checkpoint": "m"}, "run": {"run_dir": str(tmp_path)}, "services": services})
    found = spec(job, "reward", RunFolder(tmp_path))
    assert found.metrics_address == "0.0.0.0:9464"
    assert found.command[list(found.command).index("--metrics-address") + 1] == "0.0.0.0:9464"
    assert spec(job_of(tmp_path), "reward", RunFolder(tmp_path)).metrics_address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("services", "sections"),
    [
        (["buffer", "reward"], {}),
        (["buffer"], {"buffer": {"buffer_shards": 2}}),
        (["rollout"], {"services": {"rollout_services": 2}}),
    ],
)
def test_metrics_port_of_several_processes_is_refused(services: list[str], sections: dict[str, dict[str, int]]) -> None:
    of_services = {"metrics_port": 9464, **sections.get("services", {})}
    job = Job.model_validate({"model": {"hf_checkpoint": "m"}, **sections, "services": of_services})
    with pytest.raises(ConfigError, match="metrics_port 9464 is one process's"):
        check_metrics_port(job, Scope(services))
    check_metrics_port(job, Scope(["trainer"]))


@pytest.mark.parametrize("service", ["buffer", "reward", "rollout", "trainer"])
def test_a_service_runs_in_the_python_that_the_job_names(tmp_path: Path, service: str) -> None:
    named = {"buffer_python": "podman run 'the image' python", "reward_python": "/opt/reward/bin/python"}
    named |= {"rollout_python": "/opt/rollout/bin/python", "trainer_python": "/opt/trainer/bin/python"}
    job = job_of(tmp_path)
    job = job.model_copy(update={"services": job.services.model_copy(update=named)})
    words = list(spec(job, service, RunFolder(tmp_path)).command)
    at = words.index(f"services.{service}") - 1
    expected = {"buffer": ["podman", "run", "the image", "python"]}.get(service, [f"/opt/{service}/bin/python"])
    assert words[at - len(expected) : at + 2] == [*expected, "-m", f"services.{service}"]
    assert sys.executable in list(spec(job_of(tmp_path), service, RunFolder(tmp_path)).command)


NAMES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def job() -> Job:
    services = ServicesSection(**{f"{name}_address": "127.0.0.1:7001" for name in SERVICES})
    return Job.model_validate({"model": {"hf_checkpoint": Path("/m")}, "services": services})


@pytest.mark.parametrize(
    ("exported", "seen"),
    [
        ({}, [str(len(os.sched_getaffinity(0))), None, "1000"]),
        ({"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "7"}, ["3", None, "7"]),
        ({"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}, ["3", "ACTIVE", None]),
    ],
)
def test_an_engine_has_the_cores_and_short_spins_unless_the_user_exports_others(
    exported: dict[str, str], seen: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launcher, rollout service and engine each add to the environment that they were started with."""
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    for name, value in spec(job(), "rollout", RunFolder(tmp_path)).environment.items():
        monkeypatch.setenv(name, value)
    environment = {**os.environ, **arguments.environment(engine_options(job()), has_accelerator=False)}
    assert [environment.get(name) for name in NAMES] == seen
