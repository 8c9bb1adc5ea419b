"""`python forked_pytest.py FOLDER [LIBRARY …]`: reads lines of JSON, a list of pytest's arguments; answers its status.

Tests that are all skipped have shown nothing: their status is that of tests that were not found.

Libraries are imported once; every line runs in a fork that imports the folder's own modules as they are then.
Started by its path and not as a module, so that nothing of headrace, services or tests is imported before the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

SECONDS = 150
_LIBRARIES = (
    *("_pytest.assertion", "pytest", "pytest_asyncio.plugin", "hypothesis.stateful"),
    *("google.protobuf.json_format", "google.rpc.status_pb2", "grpc.aio", "grpc_health.v1.health_pb2_grpc"),
    *("blake3", "crc32c", "msgspec", "numpy", "prometheus_client", "pydantic", "structlog", "uvloop"),
)


class _Passed:
    """A plugin that counts the tests that passed."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.count += report.when == "call" and report.passed


def main() -> None:
    folder = sys.argv[1]
    sys.path[0] = folder
    os.chdir(folder)
    for library in (*_LIBRARIES, *sys.argv[2:]):
        importlib.import_module(library)
    print("ready", flush=True)
    for line in sys.stdin:
        print(_run(json.loads(line)), flush=True)


def _run(arguments: list[str]) -> int:
    child = os.fork()
    if child == 0:
        _in_child(arguments)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def _in_child(arguments: list[str]) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    import pytest

    passed = _Passed()
    status = int(pytest.main(arguments, plugins=[passed]))
    os._exit(status or (0 if passed.count else int(pytest.ExitCode.NO_TESTS_COLLECTED)))


if __name__ == "__main__":
    main()
