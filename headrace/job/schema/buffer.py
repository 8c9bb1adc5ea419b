"""The section of a job for the buffer: its limits, its store, and the choice of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from headrace.job.schema.section import Above, Bytes, NonNegative, Positive, Seconds, Section, Share
from headrace.wire.limits import MAX_ATTEMPTS, MAX_SHARDS, MAX_STALENESS


def _no_segments(value: Any) -> Any:
    if value == "segments":
        raise ValueError("buffer_store segments can only be read by earlier releases: set buffer_store to sqlite")
    return value


class BufferSection(Section):
    max_staleness: Annotated[NonNegative, Field(le=MAX_STALENESS)] = Field(
        0, description="Steps that a token's policy may be behind: 0 on-policy, 1 one-step-off, k asynchronous."
    )
    lease_seconds: Seconds = Field(60.0, description="A producer that is silent for longer loses its groups.")
    max_attempts: Annotated[Positive, Field(le=MAX_ATTEMPTS)] = Field(
        3, description="Leases of a group before it is FAILED."
    )
    buffer_store: Annotated[Literal["memory", "sqlite", "postgres"], BeforeValidator(_no_segments)] = Field(
        "sqlite", description="Where the ledger is stored; memory loses it with the process."
    )
    min_free_disk_bytes: Bytes = Field(256 << 20, description="Puts are refused while the disk has less space left.")
    buffer_postgres: str | None = Field(
        None, description="URL of the database of buffer_store postgres; its password comes from ~/.pgpass."
    )
    buffer_postgres_wait_seconds: Seconds = Field(
        120.0, description="A database that is away for longer (a failover) ends the buffer; until then it waits."
    )
    buffer_shards: Annotated[Positive, Field(le=MAX_SHARDS)] = Field(
        1,
        description="Buffers that share one ledger and are started here; a ledger keeps its number of shards.",
    )
    buffer_addresses: Annotated[tuple[str, ...], Field(max_length=MAX_SHARDS)] = Field(
        (),
        description="host:port of every shard of the ledger, in an order that never changes; in place of "
        "buffer_address.",
    )
    buffer_shard: NonNegative | None = Field(
        None, description="Which of buffer_addresses, from 0, `headrace up buffer` starts here."
    )
    max_payload_bytes: Annotated[Bytes, Field(gt=0)] = Field(
        8 << 30, description="Largest sum of stored bytes: payloads, envelopes, prompts, columns."
    )
    prompt_root: Path | None = Field(
        None, description="Folder below which clients may name prompt files; absent: they may name none."
    )
    max_groups: Positive = Field(2_000_000, description="Largest number of groups queued, leased, ready and consumed.")
    max_calls_per_peer: Positive = Field(
        40_000,
        description="Calls that one peer may have in progress at the buffer (docs/security.md says what a peer is).",
    )
    max_leases: Positive = Field(100_000, description="Largest number of leases at a time.")
    retain_steps: Annotated[NonNegative, Field(le=MAX_STALENESS)] = Field(
        100, description="Committed and dropped groups are deleted this number of steps after their own."
    )
    retain_events: Positive | None = Field(
        None,
        description="Events of the ledger's history that are at least kept; absent: all, which `headrace audit` needs.",
    )
    selection: Literal["fifo", "lifo", "priority", "freshest", "reward", "surprise"] = Field(
        "fifo", description="Which ready groups become the next batch."
    )
    buffer_filter_path: str | None = Field(
        None, description="pkg.mod.fn or file.py:fn that chooses the next batch, in place of selection."
    )
    buffer_hook_timeout_seconds: Seconds = Field(
        60.0, description="Limit of one call of buffer_filter_path or data_source_path."
    )
    expiry_action: Literal["requeue", "drop"] = Field(
        "requeue", description="What happens to a group that is too stale."
    )
    min_size_to_sample: Positive | None = Field(
        None, description="Number of ready groups before a step gets its batch."
    )
    samples_per_insert: Share | None = Field(
        None, description="Groups trained for each group generated: the target; the side that is ahead of it waits."
    )
    samples_per_insert_error_buffer: Above | None = Field(
        None,
        description="Groups by which either side may be ahead of samples_per_insert; at least one and half a step's "
        "batch.",
    )

    @property
    def num_shards(self) -> int:
        """The number of buffers that share the ledger, wherever they are started."""
        return len(self.buffer_addresses) or self.buffer_shards
