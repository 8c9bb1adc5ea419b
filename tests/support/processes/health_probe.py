"""Asks a server process for its health all the while, from a thread of its own, and says how long it took at worst."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_PAUSE_SECONDS = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


class HealthProbe:
    """The slowest answer, `worst_seconds` by the clock and `worst_busy_seconds` by the process's own computing in it.

    A machine that gives the process no time shows in the first figure only. `num_refused`: they had no answer.
    """

    def __init__(self, address: str, pid: Callable[[], int]) -> None:
        self.worst_seconds = 0.0
        self.worst_busy_seconds = 0.0
        self.num_answers = 0
        self.num_refused = 0
        self._address = address
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _ask_on(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._ended.wait(_PAUSE_SECONDS):
                self._ask(stub)

    def _ask(self, stub: health_pb2_grpc.HealthStub) -> None:
        try:
            started, used = time.monotonic(), _cpu_seconds(self._pid())
            stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            took = time.monotonic() - started
            self.num_answers += 1
            self.worst_seconds = max(self.worst_seconds, took)
            self.worst_busy_seconds = max(self.worst_busy_seconds, min(took, _cpu_seconds(self._pid()) - used))
        except (grpc.RpcError, OSError):
            self.num_refused += 1  # it may be killed or started just now: its test knows


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
