"""Services free small blocks for all threads, and what they start that is not their own does as glibc does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.job.schema.job import Job
from headrace.launch.specs import SERVICES, spec
from headrace.rpc.server import glibc_heap
from headrace.run_folder import RunFolder
from services.rollout.engine import arguments
from services.rollout.fleet_build import engine_options

HELD = """
import ctypes
from headrace.rpc.server import glibc_heap
heap, library = glibc_heap(), ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [library.malloc(1000) for _ in range(7)]
before = heap.free_bytes()
for block in blocks:
    library.free(block)
print(7000 - (heap.free_bytes() - before))
"""
"""Seven blocks of one size are what a cache takes: how much of them is not free once they are freed."""


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)


def job() -> Job:
    services = {f"{name}_address": "127.0.0.1:7001" for name in SERVICES}
    return Job.model_validate({"model": {"hf_checkpoint": Path("/m")}, "services": services})


def launched(service: str, folder: Path) -> dict[str, str]:
    return dict(spec(job(), service, RunFolder(folder)).environment)


def held_bytes(environment: dict[str, str]) -> int:
    command = [sys.executable, "-c", HELD]
    return int(subprocess.check_output(command, env=os.environ | environment, timeout=60))


def engine(launched: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    with monkeypatch.context() as service:
        for name, value in launched.items():
            service.setenv(name, value)
        return launched | arguments.environment(engine_options(job()), has_accelerator=False)


@pytest.mark.skipif(glibc_heap() is None, reason="the C library is not glibc of 2.33 or later")
def test_a_service_holds_nothing_that_it_has_freed_and_an_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = launched("rollout", tmp_path)
    assert held_bytes(rollout) <= 0
    assert held_bytes(engine(rollout, monkeypatch)) == held_bytes({}) >= 7000


def test_those_whom_strangers_call_and_no_other(tmp_path: Path) -> None:
    assert [name for name in SERVICES if "GLIBC_TUNABLES" in launched(name, tmp_path)] == [
        "buffer",
        "reward",
        "rollout",
    ]


def test_what_the_user_exports_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    environment = launched("rollout", tmp_path)
    assert "GLIBC_TUNABLES" not in environment
    assert "GLIBC_TUNABLES" not in engine(environment, monkeypatch)
