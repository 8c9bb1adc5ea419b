"""Divides a number over the shards of a ledger."""

from __future__ import annotations


def share_of_count(total: int, shard: int, num_shards: int) -> int:
    """The first shards have one more where it does not come out even."""
    return total // num_shards + (shard < total % num_shards)


def share_of_limit(total: int, num_shards: int) -> int:
    """The same for every shard, rounded up: together they may hold a little more than `total`."""
    return -(-total // num_shards)


def share_of_least(total: int, shard: int, num_shards: int) -> int:
    """A shard's share of what must be there before something happens: one at least, so that each waits for it."""
    return max(share_of_count(total, shard, num_shards), 1)
