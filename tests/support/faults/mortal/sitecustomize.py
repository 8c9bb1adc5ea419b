"""Ends a rank, a service or its engines at a line of its own log, as `kill -9` does, before anything follows the line.

Python imports this at the start of every process that has its folder in PYTHONPATH. MORTAL_ORDER names a file of the
words `EVENT RANK`, or `EVENT RANK engines`. It is deleted before anything ends, so an order is carried out once.
With SHARED_DEVICE, the folder of a fake device, a rank reports there what it says of its memory.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path


class MortalStream(io.TextIOWrapper):
    """Standard error of a process that dies of what it says."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if "SHARED_DEVICE" in os.environ:
            _account(text)
        order = Path(os.environ["MORTAL_ORDER"])
        if order.exists():
            event, rank, *victims = order.read_text().split()
            if rank == os.environ["RANK"] and f'"event": "{event}"' in text:
                order.unlink()
                for pid in _engines() if victims else [os.getpid()]:
                    os.kill(pid, signal.SIGKILL)
        return written


def _account(text: str) -> None:
    from tests.support.devices.shared_device import SharedDevice

    device, holder = SharedDevice(Path(os.environ["SHARED_DEVICE"])), f"rank-{os.environ['RANK']}"
    if '"event": "memory_taken"' in text:
        device.take("trainer", holder)
    if '"event": "memory_released"' in text:
        device.give(holder)


def _engines() -> list[int]:
    from headrace.process.linux import descendants

    return [pid for pid in descendants(os.getpid()) if "weights_engine" in Path(f"/proc/{pid}/cmdline").read_text()]


if "MORTAL_ORDER" in os.environ and "RANK" in os.environ:
    sys.stderr = MortalStream(sys.stderr.buffer, encoding="utf-8", line_buffering=True, write_through=True)
