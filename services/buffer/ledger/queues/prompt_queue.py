"""QUEUED groups in the order producers get them: by priority where asked, then by age.

Groups leave by age, so one that comes back (a lost lease, a failure) is older than all that wait: it is at the front.
"""

from __future__ import annotations

from collections import Counter

from services.buffer.ledger.group import Group
from services.buffer.ledger.queues.heap import NameHeap
from services.buffer.ledger.stream import Selection


class PromptQueue:
    """Groups leave it from its front, or are passed over there once they were discarded."""

    def __init__(self, selection: Selection) -> None:
        self._by_priority = selection is Selection.PRIORITY
        self._waiting: NameHeap[tuple[int, int]] = NameHeap()
        self._discarded: Counter[str] = Counter()
        """Ids that are still in `_waiting`, how often: one that came back is there twice, in the same place."""

    def __len__(self) -> int:
        return len(self._waiting) - self._discarded.total()

    def add(self, group: Group) -> None:
        self._waiting.add((-group.prompt.priority if self._by_priority else 0, group.seq), group.group_id)

    def take(self, count: int) -> list[str]:
        """Removes and returns at most `count` ids from the front."""
        taken: list[str] = []
        while len(taken) < count and len(self._waiting):
            _, group_id = self._waiting.pop()
            if group_id in self._discarded:
                self._discarded[group_id] -= 1
                if not self._discarded[group_id]:
                    del self._discarded[group_id]
            else:
                taken.append(group_id)
        return taken

    def discard(self, group_id: str) -> None:
        """Removes a queued group."""
        self._discarded[group_id] += 1
