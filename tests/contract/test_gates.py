"""What a client and each start load, and each error's code on the wire."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import error_classes
from headrace.rpc.status import code_of

ROOT = Path(__file__).parents[2]
SERVERS = [
    *("aiohttp", "uvloop", "psycopg", "prometheus_client", "grpc_health.v1", "grpc_reflection.v1alpha", "pyarrow"),
    *("torch", "transformers", "pydantic", "services"),
    *("headrace.rpc.server", "headrace.rpc.interceptor", "headrace.launch", "headrace.cli"),
]


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
    ],
)
def test_a_start_loads_nothing_that_it_does_not_need(start: str, heavy: list[str]) -> None:
    """Each of these costs every run, or every `--help`, up to five seconds of work."""
    program = f"{start}\nimport sys; print('loaded:', *[name for name in {heavy!r} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert told.stdout.splitlines()[-1].split() == ["loaded:"]


def test_each_error_has_a_code() -> None:
    assert {code_of(cls("")).name for cls in error_classes()} == {cls.status for cls in error_classes()}
