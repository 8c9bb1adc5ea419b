"""Ranks report to a fake device what they say of their memory in their log."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from tests.support.devices.shared_device import SharedDevice


@contextmanager
def watch(folder: Path, rank: int) -> Iterator[None]:
    """In the block this process is a holder; it raises OutOfMemory where engines hold memory."""
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
