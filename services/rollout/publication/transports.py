"""The transports of a publication: broadcast, from a folder, as an adapter, or loaded at an engine's start.

The rest of the transaction is the same for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.delta import PREFIX
from headrace.errors import DeadlineExceeded, FailedPrecondition, GroupGone, HeadraceError, InvalidArgument
from headrace.models.folders import is_whole
from headrace.publication import TensorSpec
from headrace.rpc.log import log
from services.rollout.engine.api import GroupJoin
from services.rollout.engine.arguments import MOST_ADAPTERS
from services.rollout.engine.fleet import Engine, EngineState, Fleet
from services.rollout.publication.publication import Publication
from services.rollout.publication.state import GroupPlan, Plan


class Inbound:
    """One object serves all publications that come this way. What a transport does not override is nothing to do."""

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """Raises GroupGone or FailedPrecondition before any engine notices the publication."""

    async def ready(self, publication: Publication) -> None:
        """Does what can be done while requests go on. Raises what keeps the weights from coming."""

    async def open(self, publication: Publication, engine: Engine) -> None:
        """Called for each engine once it is paused."""

    async def receive(self, publication: Publication, bucket: int) -> None:
        """Returns when every engine that still takes part has the bucket. Raises PublicationAborted."""

    def checksums(self, publication: Publication) -> Mapping[str, str] | None:
        """What all its engines have been given, by name; None: each of them is asked."""
        return None

    async def close(self, publication: Publication, engine: Engine) -> None:
        """Undoes `open`, after the last bucket or an abort; does nothing where `open` was not called."""

    async def finish(self, publication: Publication) -> None:
        """Called at a commit."""

    def release(self, plan: Plan) -> None:
        """Called at an abort, before its engines `leave`."""

    async def leave(self, plan: Plan, engine: Engine) -> None:
        """Called for each engine after an abort."""


class CollectiveInbound(Inbound):
    """Knows which engines are in which collective group.

    A group lives as long as exactly those engines do that joined it together: a restarted engine cannot take its old
    place, and a collective without it would hang.
    """

    def __init__(self) -> None:
        self._groups: dict[str, tuple[str, ...]] = {}
        """The incarnations of each group's engines, in the order of their ranks."""

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """Raises GroupGone when a group that the sender joined earlier has other engines than these."""
        whole = _incarnations(engines)
        gone = [group.name for group in plan.groups if group.joined and self._groups.get(group.name) != whole]
        if gone:
            raise GroupGone(f"groups {gone} have other members than {[*whole]}: begin with new groups")

    async def ready(self, publication: Publication) -> None:
        """Every engine that still takes part joins every group, and leaves those that the sender does not name."""
        plan = publication.plan
        if not plan.engine_ids and (gone := self._groups.keys() - set(plan.group_names)):
            await publication.participants.each(lambda engine: _leave(engine, gone))
            self._discard(gone)
        for group in plan.groups:
            if not group.joined:
                await self._join(publication, group)

    async def open(self, publication: Publication, engine: Engine) -> None:
        await engine.client.begin_weight_update()
        publication.in_session.add(engine.engine_id)

    async def receive(self, publication: Publication, bucket: int) -> None:
        plan = publication.plan
        group, tensors = plan.group_of(bucket), plan.buckets[bucket]
        if plan.delta is not None:
            num_bytes = plan.delta.bucket_bytes[sorted(plan.buckets).index(bucket)]
            tensors = [TensorSpec(f"{PREFIX}{bucket}", (num_bytes,), "uint8")]
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
        self._discard(plan.group_names)

    async def leave(self, plan: Plan, engine: Engine) -> None:
        await _leave(engine, plan.group_names)

    async def _join(self, publication: Publication, group: GroupPlan) -> None:
        engines = list(publication.participants.engines.values())
        offsets: dict[str, int] = {}
        rank = 1
        for engine in engines:
            offsets[engine.engine_id] = rank
            rank += engine.shape.devices

        async def join(engine: Engine) -> None:
            if group.name in self._groups:
                await _leave(engine, [group.name])
            place = GroupJoin(
                name=group.name,
                master_address=group.master_address,
                master_port=group.master_port,
                rank_offset=offsets[engine.engine_id],
                world_size=publication.members.world_size,
                backend=publication.plan.backend,
            )
            await engine.client.join_group(place, seconds=publication.seconds_left())

        await publication.participants.gather_collective(join)
        self._groups[group.name] = _incarnations(engines)

    def _discard(self, names: Collection[str]) -> None:
        for name in names:
            self._groups.pop(name, None)


async def _leave(engine: Engine, names: Collection[str]) -> None:
    """Ignores groups that the engine is not in."""
    for name in names:
        with contextlib.suppress(FailedPrecondition):
            await engine.client.leave_group(name)


def _incarnations(engines: Sequence[Engine]) -> tuple[str, ...]:
    return tuple(engine.incarnation for engine in engines)


class DiskInbound(Inbound):
    """Loads folders below `root` and no others; None refuses them all.

    An engine opens and closes its own session while it loads, and the folder is the trainer's to delete.
    """

    def __init__(
        self, root: Path | None, has_base: Callable[[Plan, Engine], bool] = lambda plan, engine: False
    ) -> None:
        """`has_base`: the engine needs nothing but the plan's delta."""
        self._root = root
        self._has_base = has_base
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="weights-folder")

    async def ready(self, publication: Publication) -> None:
        """Raises FailedPrecondition unless the folder is below the root and whole. A disk may hang: it has a limit."""
        folders, seconds = _folders(publication.plan), publication.seconds_left()
        folder = folders[-1]
        looking = asyncio.get_running_loop().run_in_executor(self._reading, self._require_all_whole, folders)
        try:
            await asyncio.wait_for(looking, seconds)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{folder} could not be read within {seconds:.0f} s: see whether its disk answers"
            ) from error

    async def receive(self, publication: Publication, bucket: int) -> None:
        async def load(engine: Engine) -> None:
            folders = _folders(publication.plan)
            for folder in folders[-1:] if self._has_base(publication.plan, engine) else folders:
                await engine.client.load_folder(str(folder), seconds=publication.seconds_left())

        await publication.participants.gather_independent(load)

    def _require_all_whole(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            self._require_whole(folder)

    def _require_whole(self, folder: Path) -> None:
        resolved = below_root(self._root, folder)
        if not is_whole(resolved):
            raise _not_whole(folder)


def below_root(root: Path | None, folder: Path) -> Path:
    """The folder, resolved. Raises InvalidArgument unless it is below the root."""
    if root is None:
        raise InvalidArgument("this rollout service was given no folder for weights", field="disk_path")
    try:
        resolved_root, resolved = root.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for a loop of symlinks
        raise InvalidArgument(f"{folder} cannot be read: {error}", field="disk_path") from error
    if resolved_root not in resolved.parents:
        raise InvalidArgument(
            f"{folder} is not below {resolved_root}, where this rollout service expects weights: give it and the "
            "trainer the same --update-weight-disk-path",
            field="disk_path",
        )
    return resolved


def _folders(plan: Plan) -> Sequence[Path]:
    """What an engine loads, in this order: a base if there is one, and the plan's own."""
    assert plan.folder is not None, "the receiver chose this transport for a plan without a folder"
    return (*(plan.delta.base_folders if plan.delta else ()), plan.folder)


def _not_whole(folder: Path) -> FailedPrecondition:
    return FailedPrecondition(
        f"{folder} is not a whole folder of weights on the rollout service's machine: trainer and engines must see the "
        "same --update-weight-disk-path"
    )


class AdapterInbound(DiskInbound):
    """Has engines load a folder of peft's beside what they serve; requests go on.

    An adapter is named after the publication that brought it. One that is not served any more leaves the engines with
    its last request. At most MOST_ADAPTERS are held: a publication waits until there is room.
    """

    def __init__(self, root: Path | None, fleet: Fleet, run: str = "") -> None:
        super().__init__(root)
        self._fleet = fleet
        self._weights = fleet.joined[run] if run else fleet.weights
        self._name_prefix = f"{run}." if run else ""
        self._held: dict[str, Mapping[str, str]] = {}
        """Adapters in the engines, oldest first, with the SHA-256 of each file."""
        self._leaving: dict[str, asyncio.Task[None]] = {}

    @property
    def held(self) -> Sequence[str]:
        """The adapters in the engines, oldest first."""
        return tuple(self._held)

    def name_of(self, plan: Plan) -> str:
        """Engines that come back are given the served adapter under the name that the others know."""
        served = self._weights.adapter
        return served if plan.engine_ids and served else f"{self._name_prefix}{plan.publication_id}"

    async def ready(self, publication: Publication) -> None:
        await super().ready(publication)
        while self.name_of(publication.plan) not in self._held and len(self._held) >= MOST_ADAPTERS:
            await asyncio.wait(self._leaving.values(), return_when=asyncio.FIRST_COMPLETED)
        folder = publication.plan.folder
        assert folder is not None, "DiskInbound has read it"
        self._held[self.name_of(publication.plan)] = await asyncio.to_thread(_digests, folder)

    async def receive(self, publication: Publication, bucket: int) -> None:
        name, folder = self.name_of(publication.plan), str(publication.plan.folder)

        async def load(engine: Engine) -> None:
            await engine.client.load_adapter(name, folder, seconds=publication.seconds_left())
            engine.adapters.add(name)

        await publication.participants.gather_independent(load)

    def checksums(self, publication: Publication) -> Mapping[str, str] | None:
        return self._held[self.name_of(publication.plan)]

    def serve(self, plan: Plan) -> None:
        """Called at a commit: requests that begin from now on use it."""
        former = self._weights.serve_adapter(self.name_of(plan), plan.policy_version, plan.folder)
        self._let_go(former)

    async def drop(self) -> None:
        """Returns once no engine has any, which is when no request uses one; it waits a minute at most."""
        self._weights.serve_adapter("", self._weights.policy_version, None)
        for name in self.held:
            self._let_go(name)
        if self._leaving:
            await asyncio.wait(self._leaving.values(), timeout=_UNLOAD_SECONDS)

    def _let_go(self, name: str) -> None:
        if name in self._held and name not in self._leaving:
            self._leaving[name] = asyncio.create_task(self._unload(name))

    def release(self, plan: Plan) -> None:
        if (name := self.name_of(plan)) != self._weights.adapter:
            self._held.pop(name, None)

    async def leave(self, plan: Plan, engine: Engine) -> None:
        """It may not have come so far that it has the adapter."""
        engine.adapters.discard(self.name_of(plan))
        with contextlib.suppress(FailedPrecondition, InvalidArgument):
            await engine.client.unload_adapter(self.name_of(plan), seconds=_UNLOAD_SECONDS)

    async def stop(self) -> None:
        """The engines end too."""
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    async def _unload(self, name: str) -> None:
        """A process that ended meanwhile has taken it along."""
        try:
            await self._weights.unused(name)
            engines = [engine for engine in self._fleet.engines if name in engine.adapters]
            for engine in engines:
                engine.adapters.discard(name)
            await unload_adapter(name, engines)
        finally:
            del self._held[name], self._leaving[name]

    def _require_whole(self, folder: Path) -> None:
        if not (below_root(self._root, folder) / "adapter_config.json").is_file():
            raise _not_whole(folder)


_UNLOAD_SECONDS = 60.0


async def unload_adapter(name: str, engines: Sequence[Engine]) -> None:
    """An engine that refuses is logged: it is given no other adapter of this name."""
    calls = (engine.client.unload_adapter(name, seconds=_UNLOAD_SECONDS) for engine in engines)
    for engine, error in zip(engines, await asyncio.gather(*calls, return_exceptions=True), strict=True):
        if isinstance(error, HeadraceError):
            log.info("adapter_not_unloaded", adapter=name, engine=engine.engine_id, error=error.message)


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


class NoTransfer(Inbound):
    """Serves engines that no publication has touched."""

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """Raises FailedPrecondition where an engine has been given weights since it started."""
        given = [e.engine_id for e in engines if e.weights_digest or e.state is not EngineState.READY]
        if given:
            raise FailedPrecondition(f"{given} hold other weights than those that they loaded: send the weights")
