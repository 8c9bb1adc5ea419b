"""QUEUED groups in the order producers get them: by priority where asked, then by age.

Groups leave by age, so one that comes back (a lost lease, a failure) is older than all that wait: it is at the front.
"""

from __future__ import annotations

from services.buffer.group import Group
from services.buffer.ordered import Ordered
from services.buffer.stream import Selection


class PromptQueue:
    """Groups leave it from its front only."""

    def __init__(self, selection: Selection) -> None:
        self._by_priority = selection is Selection.PRIORITY
        self._waiting: Ordered[tuple[int, int]] = Ordered()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group: Group) -> None:
        """Puts it in its place."""
        self._waiting.add((-group.prompt.priority if self._by_priority else 0, group.seq), group.group_id)

    def take(self, count: int) -> list[str]:
        """Removes at most `count` ids from the front."""
        return [self._waiting.pop()[1] for _ in range(min(count, len(self._waiting)))]
