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

BRANCHES = "".join(f"    if number == {i}:\n        return {i * 7}\n" for i in range(11))
STATEMENTS = "".join(f"    total += {i}\n" for i in range(51))
BREACHES = {
    "BLE001": "try:\n    import numpy\nexcept Exception:\n    numpy = None\n",
    "T201": "print(1)\n",
    "S301": "import pickle\n\nvalue = pickle.loads(b'')\n",
    "S602": "import subprocess\n\nsubprocess.run('ls', shell=True, check=True)\n",
    "S608": "def query(name: str) -> str:\n    return f'SELECT * FROM {name}'\n",
    "C901": f"def pick(number: int) -> int:\n{BRANCHES}    return 0\n",
    "D205": 'def name() -> str:\n    """The name, as far as\n    it is known.\n    """\n    return ""\n',
    "D415": 'def name() -> str:\n    """The name"""\n    return ""\n',
    "PLR0915": f"def add() -> int:\n    total = 0\n{STATEMENTS}    return total\n",
}
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


@pytest.mark.parametrize("rule", BREACHES)
def test_ruff_refuses_a_breach(rule: str) -> None:
    told = subprocess.run(
        [BIN / "ruff", "check", "--output-format", "concise", "--stdin-filename", "services/reward/breach.py", "-"],
        input=BREACHES[rule],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert told.returncode == 1
    assert f" {rule} " in told.stdout


def test_mypy_refuses_a_test_that_uses_a_name_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "breach.py").write_text(
        "from pathlib import Pat\nfrom pathlib import Path\n\n\ndef test():\n    Path().gone\n    Path().stat(gone=1)\n"
    )
    told = subprocess.run(
        [BIN / "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path / "cache", "-p", "tests"],
        capture_output=True, text=True, cwd=tmp_path, check=False, env={},
    )  # fmt: skip
    assert told.returncode == 1, told.stderr
    lines = [line.split(":")[1] for line in told.stdout.splitlines() if line.startswith("tests/")]
    assert list(dict.fromkeys(lines)) == ["1", "6", "7"]


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
