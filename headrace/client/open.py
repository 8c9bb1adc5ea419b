"""Opens a client for the address that a job names: one buffer, or the shards of one ledger."""

from __future__ import annotations

from headrace.client.buffer import BufferClient
from headrace.client.port import DEFAULT_DEADLINE_SECONDS, Buffer
from headrace.client.shards import ShardedBuffer


def open_buffer(address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> Buffer:
    """Connects lazily. Several addresses with commas between them are the shards of one ledger, in their order."""
    addresses = address.split(",")
    if len(addresses) == 1:
        return BufferClient(address, deadline_seconds=deadline_seconds)
    return ShardedBuffer(addresses, deadline_seconds=deadline_seconds)
