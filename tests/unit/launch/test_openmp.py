"""Threads and how they wait: defaults, and what a user exports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.job.schema.job import Job
from headrace.job.schema.services import ServicesSection
from headrace.launch.specs import SERVICES, spec
from headrace.process.openmp import threads_of_each
from headrace.run_folder import RunFolder
from services.rollout.engine import arguments
from services.rollout.fleet_build import engine_options

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


def test_ranks_share_the_cores_and_a_service_without_tensors_takes_one(tmp_path: Path) -> None:
    environments = {name: spec(job(), name, RunFolder(tmp_path)).environment for name in ("buffer", "trainer")}
    assert environments["buffer"]["OMP_NUM_THREADS"] == "1"
    assert environments["trainer"]["OMP_NUM_THREADS"] == str(threads_of_each(1))
    assert environments["trainer"]["GOMP_SPINCOUNT"] == "1000"
