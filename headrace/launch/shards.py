"""Refuses another number of shards than a ledger has: a group's number says in which of them it is."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.schema.services import BufferSection
from headrace.launch.earlier import earlier_start, has_files
from headrace.run_folder import RunFolder


def require_shards(run: RunFolder, buffer: BufferSection) -> None:
    """Raises ConfigError when the run's ledger was made with another number of shards than would be started over it.

    A shard that is started by hand has the folder to itself; its own stream says which one it is.
    """
    there = _num_shards(run, buffer)
    if there in (None, buffer.buffer_shards) or buffer.buffer_addresses:
        return
    made_with = "one buffer" if there == 1 else f"{there} shards"
    raise ConfigError(
        f"the ledger of {run.path} was made with {made_with}, and buffer_shards is {buffer.buffer_shards}: a ledger "
        f"keeps its number of shards; pass --buffer-shards {there} to continue it, or start a new run with another "
        "--run-name",
        field="buffer_shards",
    )


def _num_shards(run: RunFolder, buffer: BufferSection) -> int | None:
    """None for a run that has no ledger yet. A database does not say it; the run's earlier job does."""
    if has_files(run.ledger):
        return len([path for path in run.ledger.glob("shard-*") if path.is_dir()]) or 1
    earlier = earlier_start(run) if buffer.buffer_store == "postgres" else None
    return None if earlier is None else earlier.job.buffer.buffer_shards
