"""Asks a server process for its health all the while, and says how long it took at worst."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TICKS = os.sysconf("SC_CLK_TCK")
_PAUSE_SECONDS = 0.1


class HealthProbe:
    """Asks in a thread of its own from the start of a `with` block to its end.

    The slowest answer, `worst_seconds` by the clock and `worst_busy_seconds` by the process's own computing in it.

    A machine that gives the process no time shows in the first figure only. `num_refused`: they had no answer.
    """

    def __init__(self, address: str, pid: Callable[[], int]) -> None:
        self.worst_seconds = 0.0
        self.num_answers = 0
        self.worst_busy_seconds = 0.0
        self.num_refused = 0
        self._pid = pid
        self._channel = grpc.insecure_channel(address)
        self._stub = health_pb2_grpc.HealthStub(self._channel)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._channel.close()

    def _ask_on(self) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            self._ask()

    def _ask(self) -> None:
        try:
            started, used = time.monotonic(), _cpu_seconds(self._pid())
            self._stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            took = time.monotonic() - started
            self.num_answers += 1
            self.worst_seconds = max(self.worst_seconds, took)
            self.worst_busy_seconds = max(self.worst_busy_seconds, min(took, _cpu_seconds(self._pid()) - used))
        except (grpc.RpcError, OSError):
            self.num_refused += 1  # it may be killed or started just now: its test knows


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
