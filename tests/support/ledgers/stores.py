"""Every store that a ledger can have, by name: a new one joins the contract and model tests by a line here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from services.buffer.store.base import Store
from services.buffer.store.memory import MemoryStore
from services.buffer.store.postgres import PostgresStore
from services.buffer.store.sqlite import SqliteStore
from tests.support.processes.postgres import cluster

STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: MemoryStore(),
    "sqlite": lambda folder: SqliteStore(folder, large_call_bytes=700),
    "postgres": lambda folder: PostgresStore(cluster(), hashlib.sha256(str(folder).encode()).hexdigest()[:16]),
}
"""Opens the store of a folder. A memory store lives as long as its object and cannot be opened again."""


def reopened(kind: str, store: Store, folder: Path) -> Store:
    """The same store after a restart."""
    if kind == "memory":
        return store
    store.close()
    return STORES[kind](folder)
