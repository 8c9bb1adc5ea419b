"""Readings of what the ledger counts: every count of a stream grows from 0 while its buffer lives."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb


def grown_from(stats: pb.StreamStats, before: pb.Production | None) -> pb.Production:
    """The counts that `stats` has grown from; `before` is this trainer's last reading, None at its first.

    A trainer's first reading counts for itself what came before it, unless an earlier trainer ran on that.
    """
    now = stats.production
    if before is None:
        return pb.Production() if stats.epoch <= 1 else now
    return pb.Production() if now.num_samples < before.num_samples else before  # fewer: the buffer started again
