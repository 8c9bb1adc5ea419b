"""Refuses another number of shards than a ledger has: a group's number says in which of them it is."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ConfigError
from headrace.job.schema.buffer import BufferSection


def require_shards(ledger: Path, buffer: BufferSection) -> None:
    """Raises ConfigError when the run's ledger was made with another number of shards than would be started over it.

    A shard that is started by hand has the folder to itself; its own stream says which one it is.
    """
    there = _num_shards(ledger)
    if there in (None, buffer.buffer_shards) or buffer.buffer_addresses:
        return
    raise ConfigError(
        f"the ledger {ledger} was made with {_shards(there)}, and buffer_shards is {buffer.buffer_shards}: a ledger "
        f"keeps its number of shards; pass --buffer-shards {there} to continue it, or start a new run with another "
        "--run-name",
        field="buffer_shards",
    )


def _num_shards(ledger: Path) -> int | None:
    """None for a folder that has no ledger yet."""
    if not ledger.is_dir():
        return None
    shards = len(list(ledger.glob("shard-*")))
    return shards or (1 if any(ledger.iterdir()) else None)


def _shards(number: int | None) -> str:
    return "one buffer" if number == 1 else f"{number} shards"
