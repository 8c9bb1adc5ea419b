"""The rewards of all samples that were scored, those of groups that a filter dropped too: batches show its choice only.

It compares readings of what the ledger counts, as the breaker does.
"""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from services.trainer.metrics.readings import grown_from


class AllRewards:
    """Compares each reading with the one before it."""

    def __init__(self) -> None:
        self._last: pb.Production | None = None

    def since(self, stats: pb.StreamStats) -> dict[str, float]:
        """Metrics of what came since the reading before; none where nothing was scored."""
        now, before = stats.production, grown_from(stats, self._last)
        self._last = now
        count = now.num_scored - before.num_scored
        if not count:
            return {}
        return {"reward/all/mean": (now.reward_sum - before.reward_sum) / count, "reward/all/count": float(count)}
