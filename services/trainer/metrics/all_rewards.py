"""The rewards of all samples that were scored, and what a filter skipped: batches show its choice only.

It compares readings of what the ledger counts, as the breaker does.
"""

from __future__ import annotations

from collections import Counter

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.hooks.filter import ALL_REWARDS_ARE
from headrace.wire.checks import one_line
from services.trainer.metrics.readings import grown_from

_REASON_CHARACTERS = 80


class AllRewards:
    """Compares each reading with the one before it."""

    def __init__(self) -> None:
        self._last: pb.Production | None = None

    def since(self, stats: pb.StreamStats) -> dict[str, float]:
        """Metrics of what came since the reading before; none where nothing was scored or skipped."""
        now, before = stats.production, grown_from(stats, self._last)
        self._last = now
        found = _filtered(now, before)
        if count := now.num_scored - before.num_scored:
            found["reward/all/mean"] = (now.reward_sum - before.reward_sum) / count
            found["reward/all/count"] = float(count)
        return found


def _filtered(now: pb.Production, before: pb.Production) -> dict[str, float]:
    """The samples of groups that the filter skipped, in all and by their rewards or the filter's reasons."""
    skipped: Counter[str] = Counter()
    for production, sign in ((now, 1), (before, -1)):
        for count in production.filtered:
            skipped[_name(count, now)] += sign * count.num_samples
    skipped = +skipped
    if not skipped:
        return {}
    return {
        "samples/produced": float(now.num_samples - before.num_samples),
        "samples/filtered": float(skipped.total()),
        **{name: float(number) for name, number in skipped.items()},
    }


def _name(count: pb.FilteredCount, known: pb.Production) -> str:
    """`all_right` and `all_wrong` are the best and the worst of rewards as graders give them: 1 or more, 0 or less."""
    if not count.HasField("equal_reward") or not count.reason.startswith(ALL_REWARDS_ARE):
        return f"samples/filtered/reason/{one_line(count.reason, _REASON_CHARACTERS) or 'none'}"
    if count.equal_reward == known.highest_reward and count.equal_reward >= 1:
        return "samples/filtered/all_right"
    if count.equal_reward == known.lowest_reward and count.equal_reward <= 0:
        return "samples/filtered/all_wrong"
    return "samples/filtered/all_equal"
