"""Opens the kind of store that a job asks for."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ConfigError
from headrace.job.schema.services import BufferSection
from services.buffer.store.base import Store
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import FILE, SqliteStore

DATABASE_WAIT_SECONDS = 120.0
"""A database that is unreachable for longer (a failover) ends the buffer; until then it waits."""


def open_store(section: BufferSection, folder: Path, name: str) -> Store:
    """Raises ConfigError when the folder holds a ledger of another kind, which would be ignored otherwise."""
    if (folder / "segments").exists():
        raise ConfigError(
            f"{folder} holds a ledger of buffer_store segments, which this headrace does not read: finish the run with "
            "the headrace that wrote it, or choose another run_name, which begins a ledger of buffer_store sqlite"
        )
    if section.buffer_store != "sqlite" and (folder / FILE).exists():
        raise ConfigError(
            f"{folder} holds a ledger of buffer_store sqlite, the job says {section.buffer_store}: "
            "set buffer_store to sqlite, or choose another run_name"
        )
    match section.buffer_store:
        case "memory":
            return MemoryStore()
        case "sqlite":
            return SqliteStore(folder)
        case "postgres":
            if section.buffer_postgres is None:
                raise ConfigError("buffer_store postgres needs a database: pass --buffer-postgres postgresql://…")
            return _postgres_store(section.buffer_postgres, name)


def _postgres_store(dsn: str, name: str) -> Store:
    from services.buffer.store.postgres import PostgresStore  # its driver is an extra: headrace[postgres]

    return PostgresStore(dsn, name, wait_seconds=DATABASE_WAIT_SECONDS)
