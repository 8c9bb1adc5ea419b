"""Notices that another scorer, or another version of it, gives the rewards: the reward service was swapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.limits import one_line

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


def _versions(batch: pb.LeaseBatchResponse) -> dict[str, str]:
    """Maps each scorer to the version that most of its samples have."""
    counts = Counter((s.scorer, s.scorer_version) for group in batch.groups for s in group.samples if s.scorer)
    return dict(sorted(pair for pair, _ in reversed(counts.most_common())))
