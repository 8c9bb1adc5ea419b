"""The rewards of all samples that were scored, those of groups that a filter dropped too: batches show its choice only.

It compares readings of what the ledger counts, as the breaker does.
"""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb


class AllRewards:
    """Of the samples that came between two readings."""

    def __init__(self) -> None:
        self._last: pb.Production | None = None

    def since(self, stats: pb.StreamStats) -> dict[str, float]:
        """Metrics of what came since the reading before; none where nothing was scored."""
        now, before = stats.production, self._last
        if before is None:
            before = pb.Production() if stats.epoch <= 1 else now  # an earlier trainer had what came before a restart
        elif now.num_samples < before.num_samples:
            before = pb.Production()  # the buffer started again, and counts from 0
        self._last = now
        count = now.num_scored - before.num_scored
        if not count:
            return {}
        return {"reward/all/mean": (now.reward_sum - before.reward_sum) / count, "reward/all/count": float(count)}
