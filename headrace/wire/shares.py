"""Divides a number over the shards of a ledger."""

from __future__ import annotations


def share_of_count(total: int, shard: int, num_shards: int) -> int:
    """The first shards have one more where it does not come out even."""
    return total // num_shards + (shard < total % num_shards)
