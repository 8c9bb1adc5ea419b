"""The collective groups through which weights arrive, and the engines in each.

A group lives as long as exactly those engines do that joined it together: a restarted engine cannot take its old place,
and a collective without it would hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence

from headrace.errors import FailedPrecondition, GroupGone
from services.rollout.engine.api import GroupJoin
from services.rollout.engine.fleet import Engine
from services.rollout.publication.state import GroupPlan


class WeightGroups:
    """The groups by name."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[str, ...]] = {}

    def require_whole(self, groups: Iterable[GroupPlan], engines: Sequence[Engine]) -> None:
        """Raises GroupGone when a group that the sender joined earlier has other engines than these."""
        whole = _incarnations(engines)
        gone = [group.name for group in groups if group.joined and self._members.get(group.name) != whole]
        if gone:
            raise GroupGone(f"groups {gone} have other members than {[*whole]}: begin with new groups")

    def others(self, groups: Iterable[GroupPlan]) -> set[str]:
        """Returns the known groups that are not among these: their sender has left them."""
        return self._members.keys() - {group.name for group in groups}

    async def join(self, engine: Engine, place: GroupJoin, *, seconds: float) -> None:
        """Joins one engine; call `formed` once all have joined."""
        if place.name in self._members:
            await self.leave(engine, [place.name])
        await engine.client.join_group(place, seconds=seconds)

    def formed(self, name: str, engines: Sequence[Engine]) -> None:
        """Notes that the group has these members."""
        self._members[name] = _incarnations(engines)

    async def leave(self, engine: Engine, names: Collection[str]) -> None:
        """Ignores groups that the engine is not in."""
        for name in names:
            with contextlib.suppress(FailedPrecondition):
                await engine.client.leave_group(name)

    def discard(self, names: Collection[str]) -> None:
        """Forgets groups that have no members any more."""
        for name in names:
            self._members.pop(name, None)


def _incarnations(engines: Sequence[Engine]) -> tuple[str, ...]:
    return tuple(engine.incarnation for engine in engines)
