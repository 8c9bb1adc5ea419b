"""The transports of a publication: broadcast, from a folder, or loaded at an engine's start.

The rest of the transaction is the same for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from headrace.errors import DeadlineExceeded, FailedPrecondition, GroupGone, InvalidArgument
from headrace.models.folders import is_whole
from services.rollout.engine.api import GroupJoin
from services.rollout.engine.fleet import Engine, EngineState
from services.rollout.publication.publication import Publication
from services.rollout.publication.state import GroupPlan, Plan


class Inbound(Protocol):
    """One object serves all publications that come this way."""

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """Raises GroupGone or FailedPrecondition before any engine notices the publication."""

    async def ready(self, publication: Publication) -> None:
        """Does what can be done while requests go on. Raises what keeps the weights from coming."""

    async def open(self, publication: Publication, engine: Engine) -> None:
        """Called for each engine once it is paused."""

    async def receive(self, publication: Publication, bucket: int) -> None:
        """Returns when every engine that still takes part has the bucket. Raises PublicationAborted."""

    async def close(self, publication: Publication, engine: Engine) -> None:
        """Undoes `open`, after the last bucket or an abort; does nothing where `open` was not called."""

    async def finish(self, publication: Publication) -> None:
        """Called at a commit."""

    def release(self, plan: Plan) -> None:
        """Called at an abort, before its engines `leave`."""

    async def leave(self, plan: Plan, engine: Engine) -> None:
        """Called for each engine after an abort."""


# The collective groups through which weights arrive, and the engines in each.
# A group lives as long as exactly those engines do that joined it together: a restarted engine cannot take its old
# place, and a collective without it would hang.


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


class CollectiveInbound:
    """Knows which engines are in which group."""

    def __init__(self) -> None:
        self._groups = WeightGroups()

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        self._groups.require_whole(plan.groups, engines)

    async def ready(self, publication: Publication) -> None:
        """Every engine that still takes part joins every group."""
        if not publication.plan.engine_ids:
            await self._leave_old_groups(publication)
        for group in publication.plan.groups:
            if not group.joined:
                await self._join(publication, group)

    async def open(self, publication: Publication, engine: Engine) -> None:
        await engine.client.begin_weight_update()
        publication.in_session.add(engine.engine_id)

    async def receive(self, publication: Publication, bucket: int) -> None:
        group, tensors = publication.plan.group_of(bucket), publication.plan.buckets[bucket]
        await publication.participants.gather_collective(
            lambda e: e.client.receive_bucket(group.name, tensors, seconds=publication.seconds_left())
        )

    async def close(self, publication: Publication, engine: Engine) -> None:
        if engine.engine_id in publication.in_session:
            await engine.client.end_weight_update()
            publication.in_session.discard(engine.engine_id)

    async def finish(self, publication: Publication) -> None:
        """Leaves the groups of a publication for a few engines: the next publication is for all of them again."""
        if publication.plan.engine_ids:
            self.release(publication.plan)
            for engine in publication.participants.remaining:
                await self.leave(publication.plan, engine)

    def release(self, plan: Plan) -> None:
        self._groups.discard(plan.group_names)

    async def leave(self, plan: Plan, engine: Engine) -> None:
        await self._groups.leave(engine, plan.group_names)

    async def _join(self, publication: Publication, group: GroupPlan) -> None:
        engines = list(publication.participants.engines.values())
        offsets: dict[str, int] = {}
        rank = 1
        for engine in engines:
            offsets[engine.engine_id] = rank
            rank += engine.tensor_parallel_size

        async def join(engine: Engine) -> None:
            place = GroupJoin(
                name=group.name,
                master_address=group.master_address,
                master_port=group.master_port,
                rank_offset=offsets[engine.engine_id],
                world_size=publication.begun.world_size,
                backend=publication.plan.backend,
            )
            await self._groups.join(engine, place, seconds=publication.seconds_left())

        await publication.participants.gather_collective(join)
        self._groups.formed(group.name, engines)

    async def _leave_old_groups(self, publication: Publication) -> None:
        """Leaves the groups that the trainer's plan does not name any more."""
        if gone := self._groups.others(publication.plan.groups):
            await publication.participants.each(lambda engine: self._groups.leave(engine, gone))
            self._groups.discard(gone)


class DiskInbound:
    """Loads folders below `root` and no others; None refuses them all."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="weights-folder")

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """Nothing: the folder is looked at in `ready`, because a disk may hang."""

    async def ready(self, publication: Publication) -> None:
        """Raises FailedPrecondition unless the folder is below the root and whole."""
        folder, seconds = publication.plan.folder, publication.seconds_left()
        assert folder is not None, "the receiver chose this transport for a plan without a folder"
        looking = asyncio.get_running_loop().run_in_executor(self._reading, self._require_whole, folder)
        try:
            await asyncio.wait_for(looking, seconds)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{folder} could not be read within {seconds:.0f} s: see whether its disk answers"
            ) from error

    async def open(self, publication: Publication, engine: Engine) -> None:
        """Nothing: an engine opens and closes its own session while it loads."""

    async def receive(self, publication: Publication, bucket: int) -> None:
        folder = publication.plan.folder
        await publication.participants.gather_independent(
            lambda e: e.client.load_folder(str(folder), seconds=publication.seconds_left())
        )

    async def close(self, publication: Publication, engine: Engine) -> None:
        """Nothing was opened."""

    async def finish(self, publication: Publication) -> None:
        """The folder is the trainer's to delete."""

    def release(self, plan: Plan) -> None:
        """Nothing is remembered."""

    async def leave(self, plan: Plan, engine: Engine) -> None:
        """No engine was bound to anything."""

    def _require_whole(self, folder: Path) -> None:
        if self._root is None:
            raise InvalidArgument("this rollout service was given no folder for weights", field="disk_path")
        try:
            root, resolved = self._root.resolve(), folder.resolve()
        except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for a loop of symlinks
            raise InvalidArgument(f"{folder} cannot be read: {error}", field="disk_path") from error
        if root not in resolved.parents:
            raise InvalidArgument(
                f"{folder} is not below {root}, where this rollout service expects weights: give it and the trainer "
                "the same --update-weight-disk-path",
                field="disk_path",
            )
        if not is_whole(resolved):
            raise FailedPrecondition(
                f"{folder} is not a whole folder of weights on the rollout service's machine: trainer and engines must "
                "see the same --update-weight-disk-path"
            )


class NoTransfer:
    """Serves engines that no publication has touched."""

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """Raises FailedPrecondition where an engine has been given weights since it started."""
        given = [e.engine_id for e in engines if e.weights_digest or e.state is not EngineState.READY]
        if given:
            raise FailedPrecondition(f"{given} hold other weights than those that they loaded: send the weights")

    async def ready(self, publication: Publication) -> None:
        """Nothing comes."""

    async def open(self, publication: Publication, engine: Engine) -> None:
        """Nothing comes."""

    async def receive(self, publication: Publication, bucket: int) -> None:
        """Its plan has no bucket."""

    async def close(self, publication: Publication, engine: Engine) -> None:
        """Nothing was opened."""

    async def finish(self, publication: Publication) -> None:
        """Nothing is left."""

    def release(self, plan: Plan) -> None:
        """Nothing is remembered."""

    async def leave(self, plan: Plan, engine: Engine) -> None:
        """No engine was bound to anything."""
