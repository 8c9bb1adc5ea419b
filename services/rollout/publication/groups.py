"""The collective groups that weights come in, and the engines that are in each.

A group lives as long as exactly those engines do that joined it together: one that started again cannot take its old
place, and a collective without it would hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence

from headrace.errors import FailedPrecondition, GroupGone
from services.rollout.engine.api import GroupJoin
from services.rollout.engine.fleet import Engine
from services.rollout.publication.state import GroupPlan


class WeightGroups:
    """By name."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[str, ...]] = {}

    def require_whole(self, groups: Iterable[GroupPlan], engines: Sequence[Engine]) -> None:
        """Raises GroupGone for a group that the sender is in with other engines: none must be lost to it."""
        whole = _incarnations(engines)
        gone = [group.name for group in groups if group.joined and self._members.get(group.name) != whole]
        if gone:
            raise GroupGone(f"groups {gone} are of other engines than {[*whole]}: begin with new ones")

    def others(self, groups: Iterable[GroupPlan]) -> set[str]:
        """Known, and not among these: their sender has given them up."""
        return self._members.keys() - {group.name for group in groups}

    async def join(self, engine: Engine, place: GroupJoin, *, seconds: float) -> None:
        """One engine's part; `formed` once all have done it."""
        if place.name in self._members:
            await self.leave(engine, [place.name])
        await engine.client.join_group(place, seconds=seconds)

    def formed(self, name: str, engines: Sequence[Engine]) -> None:
        """They are in it together."""
        self._members[name] = _incarnations(engines)

    async def leave(self, engine: Engine, names: Collection[str]) -> None:
        """Also where the engine is in no such group."""
        for name in names:
            with contextlib.suppress(FailedPrecondition):
                await engine.client.leave_group(name)

    def forget(self, names: Collection[str]) -> None:
        """Nobody is in them any more."""
        for name in names:
            self._members.pop(name, None)


def _incarnations(engines: Sequence[Engine]) -> tuple[str, ...]:
    return tuple(engine.incarnation for engine in engines)
