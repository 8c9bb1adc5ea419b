"""What a run's counts in the ledger say: the rewards of all samples, and a run that cannot learn.

Such a run ends: too many of the latest samples failed, or none of very many could be used. Only differences between
readings count, so every producer's failures are seen and nothing from before the start. The window reaches
from the newest reading back to the first one that is `window` samples older, or a little further.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.hooks.filter import ALL_REWARDS_ARE
from headrace.job.schema.production import RolloutSection
from headrace.limits import one_line


def grown_from(stats: pb.StreamStats, before: pb.Production | None) -> pb.Production:
    """The counts that `stats` has grown from; `before` is this trainer's last reading, None at its first.

    A trainer's first reading counts for itself what came before it, unless an earlier trainer ran on that.
    """
    now = stats.production
    if before is None:
        return pb.Production() if stats.epoch <= 1 else now
    return pb.Production() if now.num_samples < before.num_samples else before  # fewer: the buffer started again


_MIN_WINDOW = 32
_REASONS_SHOWN = 3
_WINDOWS_WITHOUT_A_SAMPLE = 10
"""Filters may drop what is too easy or too hard for a while; this many windows without a usable sample end the run."""


class FailureBudget:
    """One window for failures, a longer one for samples of which none was usable."""

    def __init__(self, max_failed_share: float, window: int) -> None:
        self._max_failed_share = max_failed_share
        self._recent = Window(window)
        self._long = Window(_WINDOWS_WITHOUT_A_SAMPLE * window)

    @classmethod
    def of(cls, rollout: RolloutSection) -> FailureBudget:
        """A window is one step's samples, and 32 at least."""
        step = (rollout.rollout_batch_size or 1) * (rollout.n_samples_per_prompt or 1)
        return cls(rollout.max_failed_share, max(step, _MIN_WINDOW))

    def verdict(self, stats: pb.StreamStats) -> str | None:
        """Why the run should end, for a person; None while it should go on."""
        recent, long = self._recent.since(stats), self._long.since(stats)
        if self._max_failed_share >= 1:
            return None
        if recent and recent.num_failed > self._max_failed_share * recent.num_samples:
            return (
                f"{recent.num_failed} of the last {recent.num_samples} samples failed, more than --max-failed-share "
                f"{self._max_failed_share:g} allows:\n{_reasons(recent)}"
            )
        if long and long.num_failed + long.num_dropped == long.num_samples:
            return f"not one of the last {long.num_samples} samples could be used:\n{_reasons(long)}"
        return None


class Window:
    def __init__(self, size: int) -> None:
        self._size = size
        self._readings: deque[pb.Production] = deque()

    def since(self, stats: pb.StreamStats) -> pb.Production | None:
        """The production within the window; None until a window's samples have come."""
        readings, now = self._readings, stats.production
        start = grown_from(stats, readings[-1] if readings else None)
        if not readings or start is not readings[-1]:
            readings.clear()
            readings.append(start)
        if now.num_samples > readings[-1].num_samples:
            readings.append(now)
        while len(readings) > 1 and now.num_samples - readings[1].num_samples >= self._size:
            readings.popleft()
        if now.num_samples - readings[0].num_samples < self._size:
            return None
        return _difference(now, readings[0])


def _difference(now: pb.Production, then: pb.Production) -> pb.Production:
    before = Counter({count.reason: count.num_samples for count in then.failures})
    failures = [
        pb.FailureCount(
            reason=count.reason,
            num_samples=count.num_samples - before[count.reason],
            example=count.example,
            group_id=count.group_id,
        )
        for count in now.failures
        if count.num_samples > before[count.reason]
    ]
    return pb.Production(
        num_samples=now.num_samples - then.num_samples,
        num_failed=now.num_failed - then.num_failed,
        num_dropped=now.num_dropped - then.num_dropped,
        failures=sorted(failures, key=lambda count: -count.num_samples),
    )


def _reasons(production: pb.Production) -> str:
    shown = [
        f"  {count.num_samples} {one_line(count.reason)}: {one_line(count.example, 400)} (e.g. group {count.group_id})"
        for count in production.failures
    ]
    rest = sum(count.num_samples for count in production.failures[_REASONS_SHOWN:])
    return "\n".join(shown[:_REASONS_SHOWN] + ([f"  {rest} for other reasons"] if rest else []))


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


_MIXED_BATCHES = 4
"""A swap mixes old and new samples in a few batches; a data set with several scorers mixes them in more."""


class Scorers:
    """Compares each batch with those before it."""

    def __init__(self) -> None:
        self._known: Mapping[str, str] = {}
        """Scorer → its version."""
        self._num_mixed = 0

    def swap(self, batch: pb.LeaseBatchResponse) -> str | None:
        """Returns `scorer f1 -> math` for the first batch that none of the known scorers scored, and None for others.

        A scorer with another version is a swap, too: `scorer custom a.py:f 1b2c -> a.py:f 9d8e`.
        """
        now, before = _versions(batch), self._known
        if not now or not before:
            self._known = now or before
            return None
        both = sorted(before.keys() & now.keys())
        if not both:
            self._known, self._num_mixed = now, 0
            return one_line(f"scorer {', '.join(before)} -> {', '.join(now)}")
        self._known = {name: now.get(name, version) for name, version in before.items()}
        if now.keys() - before.keys():
            self._num_mixed += 1
            if self._num_mixed >= _MIXED_BATCHES:
                self._known = {**before, **now}
        swaps = [f"{name} {before[name]} -> {now[name]}" for name in both if before[name] != now[name]]
        return one_line(f"scorer {', '.join(swaps)}") if swaps else None


_SCORER_CHARACTERS = 120


def scored_by(batch: pb.LeaseBatchResponse) -> dict[str, float]:
    """Metrics of how many samples of the batch each scorer has paid for. A version's path is cut to its last part."""
    counts = Counter(
        one_line(f"{s.scorer} {s.scorer_version.rpartition('/')[2]}".rstrip(), _SCORER_CHARACTERS).replace("/", "|")
        for group in batch.groups
        for s in group.samples
        if s.scorer
    )
    return {f"samples/scored_by/{name}": float(count) for name, count in counts.items()}


def _versions(batch: pb.LeaseBatchResponse) -> dict[str, str]:
    """Maps each scorer to the version that most of its samples have."""
    counts = Counter((s.scorer, s.scorer_version) for group in batch.groups for s in group.samples if s.scorer)
    return dict(sorted(pair for pair, _ in reversed(counts.most_common())))
