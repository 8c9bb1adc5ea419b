"""Opens a client for the address that a job names: of one service, or of several with commas between them."""

from __future__ import annotations

from headrace.client.buffer import BufferClient
from headrace.client.rollout import Rollout, RolloutClient, RolloutClients
from headrace.client.shards import ShardedBuffer
from headrace.rpc.client import DEFAULT_DEADLINE_SECONDS

Buffer = BufferClient | ShardedBuffer
"""Both have the same methods, and the same contract tests."""


def open_buffer(address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> Buffer:
    """Connects lazily. Several addresses with commas between them are the shards of one ledger, in their order."""
    addresses = address.split(",")
    if len(addresses) == 1:
        return BufferClient(address, deadline_seconds=deadline_seconds)
    return ShardedBuffer(addresses, deadline_seconds=deadline_seconds)


def open_rollout(address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS, run: str = "") -> Rollout:
    """Connects lazily. Several addresses with commas between them are the rollout services of one run.

    `run`: the one that asks, where several share a service.
    """
    addresses = address.split(",")
    if len(addresses) == 1:
        return RolloutClient(address, deadline_seconds=deadline_seconds, run=run)
    return RolloutClients(addresses, deadline_seconds=deadline_seconds, run=run)
