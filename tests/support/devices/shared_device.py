"""A device with room for the trainer or for the engines, and not for both: a fake that counts, over processes.

Each holder has a file in a folder, with its side, process and bytes. Who takes memory while the other side holds some
is refused, and the refusal stays. What a process held that has ended is free. `events` is all that happened, in order.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog


class OutOfMemory(RuntimeError):
    """The other side has the device."""


class SharedDevice:
    """Of one folder, which all processes see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, side: str, holder: str, num_bytes: int = 1) -> None:
        """Raises OutOfMemory, and notes it, when somebody of another side holds memory."""
        with self._alone():
            others = [row for row in self._rows() if row["side"] != side]
            if others:
                self._note(f"REFUSED {holder}: {others}")
                raise OutOfMemory(f"{holder} takes memory that {others} hold")
            self._file(holder).write_text(json.dumps({"side": side, "pid": os.getpid(), "bytes": num_bytes}))
            self._note(f"{holder} takes")

    def give(self, holder: str) -> None:
        """Does nothing for one that holds nothing."""
        with self._alone():
            if self._file(holder).exists():
                self._file(holder).unlink()
                self._note(f"{holder} gives")

    @property
    def events(self) -> list[str]:
        """All that was taken, given and refused, in order."""
        path = self.folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    def note(self, event: str) -> None:
        """Something else that happened in between."""
        with self._alone():
            self._note(event)

    def _rows(self) -> list[dict[str, object]]:
        rows = [json.loads(path.read_text()) for path in self.folder.glob("*.holder")]
        return [row for row in rows if _lives(row["pid"])]

    def _file(self, holder: str) -> Path:
        return self.folder / f"{holder}.holder"

    def _note(self, event: str) -> None:
        with (self.folder / "events").open("a") as events:
            events.write(f"{event}\n")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@contextmanager
def watch(folder: Path, rank: int) -> Iterator[None]:
    """In the block this rank reports what it says of its memory in its log; OutOfMemory where engines hold memory."""
    device = SharedDevice(folder)

    def account(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event["event"] == "memory_taken":
            device.take("trainer", f"rank-{rank}", event.get("num_bytes", 1))
        if event["event"] == "memory_released":
            device.give(f"rank-{rank}")
        return event

    before = structlog.get_config()["processors"]
    structlog.configure(processors=[account, *before])
    try:
        yield
    finally:
        structlog.configure(processors=before)


def _lives(pid: int) -> bool:
    """A process that was killed holds nothing, though its starter may not have waited for it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
