"""Which store a job asks for."""

from __future__ import annotations

from pathlib import Path

from headrace.config.job import BufferSection, Job
from headrace.errors import ConfigError
from services.buffer.store.base import Store
from services.buffer.store.memory import MemoryStore
from services.buffer.store.segments import SegmentStore
from services.buffer.store.sqlite import SqliteStore

_MARKS = {"sqlite": "ledger.sqlite", "segments": "segments"}


def store_of_job(job: Job, folder: Path) -> Store:
    """Its ledger's name in a database is the run's, and the shard's number."""
    shard = job.buffer.buffer_shard
    return open_store(job.buffer, folder, job.run.run_name + ("" if shard is None else f"/{shard}"))


def open_store(section: BufferSection, folder: Path, name: str) -> Store:
    """Raises ConfigError when the folder holds a ledger of another kind: it would be passed over in silence."""
    for kind, mark in _MARKS.items():
        if kind != section.buffer_store and (folder / mark).exists():
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
        case "postgres":
            if section.buffer_postgres is None:
                raise ConfigError("buffer_store postgres needs a database: pass --buffer-postgres postgresql://…")
            return _postgres_store(section.buffer_postgres, name)


def _postgres_store(dsn: str, name: str) -> Store:
    from services.buffer.store.postgres import PostgresStore  # its driver is an extra: headrace[postgres]

    return PostgresStore(dsn, name)
