"""Groups by their latest change, newest first, in every state; ListGroups pages through them."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from services.buffer.ledger.group import Group, GroupState

_Entry = tuple[int, str]


class ChangeOrder:
    """A list of (position, group_id) for each state; entries of groups that changed are skipped, then compacted."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups
        self._lists: dict[GroupState, list[_Entry]] = {state: [] for state in GroupState}
        self._stale: dict[GroupState, int] = dict.fromkeys(GroupState, 0)

    def left(self, state: GroupState) -> None:
        """Notes that a group has left `state`; obsolete entries are removed from the end, and all of them at half."""
        self._stale[state] += 1
        entries = self._lists[state]
        while entries and not self._is_current(entries[-1]):
            entries.pop()
            self._stale[state] -= 1
        if self._stale[state] > 64 and self._stale[state] * 2 > len(entries):
            self._lists[state] = [entry for entry in entries if self._is_current(entry)]
            self._stale[state] = 0

    def entered(self, group: Group) -> None:
        """Adds a group at the end: its position is above all earlier ones."""
        self._lists[group.state].append((group.position, group.group_id))

    def before(self, position: int, states: Iterable[GroupState]) -> Iterator[Group]:
        """Yields the groups in `states` whose latest change is below `position`, newest first."""
        walks = (self._walk(state, position) for state in states)
        return (self._groups[group_id] for _, group_id in heapq.merge(*walks, reverse=True))

    def _walk(self, state: GroupState, position: int) -> Iterator[_Entry]:
        entries = self._lists[state]
        for i in range(bisect_left(entries, (position, "")) - 1, -1, -1):
            if self._is_current(entries[i]):
                yield entries[i]

    def _is_current(self, entry: _Entry) -> bool:
        group = self._groups.get(entry[1])
        return group is not None and group.position == entry[0]
