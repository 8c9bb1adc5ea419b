"""Which store a job asks for."""

from __future__ import annotations

from pathlib import Path

from headrace.config.job import BufferSection
from headrace.errors import ConfigError
from services.buffer.store.base import Store
from services.buffer.store.memory import MemoryStore
from services.buffer.store.segments import SegmentStore
from services.buffer.store.sqlite import SqliteStore

_MARKS = {"sqlite": "ledger.sqlite", "segments": "segments"}


def open_store(section: BufferSection, folder: Path) -> Store:
    """Raises ConfigError when the folder holds a ledger of another kind: it would be passed over in silence."""
    for kind, name in _MARKS.items():
        if kind != section.buffer_store and (folder / name).exists():
            raise ConfigError(
                f"{folder} holds a ledger of buffer_store {kind}, the job says {section.buffer_store}: "
                f"set buffer_store to {kind}, or choose another run_name"
            )
    match section.buffer_store:
        case "memory":
            return MemoryStore()
        case "sqlite":
            return SqliteStore(folder)
        case "segments":
            return SegmentStore(folder)
