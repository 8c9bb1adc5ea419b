"""Each gate of `make lint` refuses a tree with one breach, and the product itself keeps within it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import error_classes
from headrace.rpc.status import code_of

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
IMPORTS = {
    "services do not import each other": ("services/reward/breach.py", "import services.buffer"),
    "headrace imports no service": ("headrace/breach.py", "import services.reward"),
    "headrace, buffer and reward import no torch": ("services/buffer/breach.py", "import torch"),
    "errors are plain: headrace.rpc.status has their codes": ("headrace/errors.py", "import grpc"),
    "a client loads no server": ("headrace/client/breach.py", "import headrace.rpc.server"),
    "no cycles between the rooms of headrace and services": (
        "services/reward/registry.py",
        "import services.reward.scoring",
    ),
    "the ledger's state machine is pure": ("services/buffer/ledger/breach.py", "import time"),
    "the trainer's mathematics and its plan know no process, disk or service": (
        "services/trainer/plan/breach.py",
        "import asyncio",
    ),
    "servers import no client": ("services/reward/breach.py", "import headrace.client"),
    "services know neither the command line nor the launcher": ("services/reward/breach.py", "import headrace.cli"),
    "Ray is two modules'": ("headrace/launch/breach.py", "import ray"),
    "Weights & Biases is one module's": ("services/trainer/serving/breach.py", "import wandb"),
    "psycopg is one store's": ("services/buffer/store/breach.py", "import psycopg"),
    "SQLite is one store's": ("services/buffer/store/breach.py", "import sqlite3"),
    "aiohttp is two modules'": ("services/rollout/breach.py", "import aiohttp"),
}
SERVERS = [
    "aiohttp",
    "uvloop",
    "psycopg",
    "prometheus_client",
    "grpc_health.v1",
    "grpc_reflection.v1alpha",
    "pyarrow",
    "torch",
    "transformers",
    "pydantic",
    "services",
    "headrace.rpc.server",
    "headrace.rpc.interceptor",
    "headrace.launch",
    "headrace.cli",
]


def test_import_linter_refuses_a_breach_of_each_contract(tmp_path: Path) -> None:
    for package in ("headrace", "services"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, line in IMPORTS.values():
        with (tmp_path / path).open("a") as file:
            file.write(f"{line}\n")
    told = subprocess.run(
        [BIN / "lint-imports", "--no-cache"], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
    )  # fmt: skip
    assert told.returncode == 1
    lines = [line for line in told.stdout.splitlines() if " BROKEN" in line]
    refused = {line.partition(" BROKEN")[0] for line in lines}
    assert refused == set(IMPORTS)


def test_a_client_loads_no_library_of_a_server() -> None:
    program = (
        "import sys, headrace.client.open, headrace.client.reward, headrace.client.rollout, headrace.client.trainer;"
        f"print(*[name for name in {SERVERS!r} if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert told.stdout.split() == []


@pytest.mark.parametrize(
    ("start", "heavy"),
    [
        ("from headrace.cli.main import main; main(['--help'])", ["grpc", "rich", "numpy", "asyncio"]),
        ("import services.rollout.__main__", ["torch", "transformers", "sglang"]),
        ("import services.rollout.engine.launch", ["torch", "sglang"]),
        ("import services.rollout.engine.router_process", ["torch", "fastapi", "sglang"]),
    ],
)
def test_a_start_loads_nothing_that_it_does_not_need(start: str, heavy: list[str]) -> None:
    """Each of these costs every run, or every `--help`, up to five seconds of work."""
    program = f"{start}\nimport sys; print('loaded:', *[name for name in {heavy!r} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert told.stdout.splitlines()[-1].split() == ["loaded:"]


def test_each_error_has_a_code() -> None:
    assert {code_of(cls("")).name for cls in error_classes()} == {cls.status for cls in error_classes()}
