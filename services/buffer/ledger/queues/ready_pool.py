"""READY groups that no batch has yet, in the order of the stream's selection, and by age for expiry.

FIFO and LIFO go by admission, PRIORITY by the prompt's, FRESHEST by the oldest token's policy version, REWARD by the
mean reward (highest first), SURPRISE by the mean |R - mean of the group|, the size of what GRPO learns from: groups of
equal rewards come last. Ties, and groups without rewards, go by admission.

Entries of groups that left are skipped when they come up, and dropped once they are the half: no command looks at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.buffer.ledger.group import Group
from services.buffer.ledger.queues.heap import NameHeap
from services.buffer.ledger.stream import Selection

_Key = tuple[float, int]
_FEW = 64


class ReadyPool:
    """Ids only; `IndexedStream` has the groups."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._live: dict[str, _Key] = {}
        self._chosen: NameHeap[_Key] = NameHeap()
        self._oldest: NameHeap[tuple[int, float, int]] = NameHeap()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._live

    def add(self, group: Group) -> None:
        key = self._key(group)
        self._live[group.group_id] = key
        self._chosen.add(key, group.group_id)
        if group.oldest_version is not None:
            self._oldest.add((group.oldest_version, *key), group.group_id)
        self._compact()

    def discard(self, group_id: str) -> None:
        """Removes the group if it is there."""
        self._live.pop(group_id, None)

    def by_admission(self) -> list[str]:
        """Returns all ids, in the order in which the user's function sees them."""
        return sorted(self._live, key=self._live.__getitem__)

    def first(self, count: int) -> list[str]:
        """Removes and returns the first `count` ids. There must be as many."""
        taken: list[str] = []
        while len(taken) < count:
            key, group_id = self._chosen.pop()
            if self._live.get(group_id) == key:
                del self._live[group_id]
                taken.append(group_id)
        return taken

    def older_than(self, version: int, most: int) -> list[str]:
        """Removes and returns at most `most` ids whose oldest token is older than `version`."""
        taken: list[str] = []
        while len(taken) < most and (first := self._oldest.first()) and first[0][0] < version:
            (_, *key), group_id = self._oldest.pop()
            if self._live.get(group_id) == tuple(key):
                del self._live[group_id]
                taken.append(group_id)
        return taken

    def _compact(self) -> None:
        most = 2 * len(self._live) + _FEW
        if len(self._chosen) > most:
            self._chosen.retain(lambda key, group_id: self._live.get(group_id) == key)
        if len(self._oldest) > most:
            self._oldest.retain(lambda key, group_id: self._live.get(group_id) == key[1:])

    def _key(self, group: Group) -> _Key:
        match self._selection:
            case Selection.FIFO | Selection.HOOK:
                return 0, group.admitted_at
            case Selection.LIFO:
                return 0, -group.admitted_at
            case Selection.PRIORITY:
                return -group.prompt.priority, group.admitted_at
            case Selection.FRESHEST:
                return -(group.oldest_version or 0), group.admitted_at
            case Selection.REWARD:
                return -_mean(group.rewards, nothing=-math.inf), group.admitted_at
            case Selection.SURPRISE:
                mean = _mean(group.rewards, nothing=0.0)
                return -_mean([abs(reward - mean) for reward in group.rewards], nothing=0.0), group.admitted_at


def _mean(values: Sequence[float], *, nothing: float) -> float:
    return sum(values) / len(values) if values else nothing
