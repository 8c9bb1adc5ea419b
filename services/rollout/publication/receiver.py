"""Takes the engines through one publication after another: joins groups, receives buckets, verifies, flips the version.

Consumes: begin, bucket, commit and abort from the trainer. Waits for: engines, each time with a limit. Unblocked by:
the publication's deadline, which aborts it from inside. Produces: engines that serve the new version, all at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from headrace.errors import (
    ChecksumMismatch,
    FailedPrecondition,
    HeadraceError,
    NotFound,
    PublicationAborted,
    Unavailable,
)
from headrace.rpc.log import log
from services.rollout.engine.api import GroupJoin
from services.rollout.engine.fleet import Engine, EngineState, Fleet
from services.rollout.publication.canary import Canary
from services.rollout.publication.checksums import differences, digest
from services.rollout.publication.groups import WeightGroups
from services.rollout.publication.publication import Begun, Committed, Publication
from services.rollout.publication.state import Fence, GroupPlan, Phase, Plan

# When one engine of a collective has failed, the others either finish at once or hang in it.
_STRAGGLER_SECONDS = 10.0
_REMEMBERED = 8


class Receiver:
    """At most one publication is open."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._fence = Fence()
        self._publications: dict[str, Publication] = {}
        self._groups = WeightGroups()

    @property
    def open_id(self) -> str:
        """The open publication; empty: none."""
        return next((i for i, p in self._publications.items() if p.transaction.phase is Phase.OPEN), "")

    async def begin(self, plan: Plan) -> Begun:
        """Answers at once; engines join the groups meanwhile.

        Raises FailedPrecondition while another one is open, and GroupGone for a joined group of other engines.
        """
        self._fence.pass_(plan.epoch)
        if plan.publication_id in self._publications:
            return self._publications[plan.publication_id].begun
        await self._make_room(plan)
        engines = self._engines_for(plan)
        self._groups.require_whole(plan.groups, engines)
        begun = Begun(
            world_size=1 + sum(engine.tensor_parallel_size for engine in engines),
            group_alive=tuple(self._groups.is_whole(group.name, engines) for group in plan.groups),
            engine_ids=tuple(engine.engine_id for engine in engines),
        )
        publication = Publication(plan, engines, begun)
        self._remember(publication)
        for engine in engines:
            engine.state = EngineState.UPDATING
        publication.preparing = asyncio.create_task(self._prepare(publication))
        publication.timer = asyncio.create_task(self._expire(publication))
        log.info("publication_begun", publication_id=plan.publication_id, engines=begun.engine_ids)
        return begun

    async def receive(self, publication_id: str, bucket: int) -> tuple[str, ...]:
        """Answers the engines lost so far, once all others have the bucket. Raises PublicationAborted.

        Goes on when the caller goes away: a broadcast cannot be taken back, and the caller may ask again.
        """
        publication = self._find(publication_id)
        publication.transaction.plan.group_of(bucket)
        if bucket not in publication.buckets:
            publication.buckets[bucket] = asyncio.create_task(self._receive(publication, bucket))
        return await asyncio.shield(publication.buckets[bucket])

    async def commit(
        self, publication_id: str, checksums: Mapping[str, str], canary: Canary | None = None
    ) -> Committed:
        """Verifies, flips the version, lets requests go on. Raises ChecksumMismatch, and aborts, when nobody passes."""
        publication = self._find(publication_id)
        if publication.committing is None:
            publication.transaction.require_complete()
            publication.committing = asyncio.create_task(self._commit(publication, checksums, canary))
        return await asyncio.shield(publication.committing)

    async def abort(self, publication_id: str, why: str) -> None:
        """Gives it up; engines that were touched start again from hf_checkpoint. Nothing happens when it has ended."""
        publication = self._publications.get(publication_id)
        if publication and publication.transaction.abort(why):
            await self._clean_up(publication)

    async def close(self) -> None:
        """Gives an open publication up."""
        if self.open_id:
            await self.abort(self.open_id, "the rollout service stops")

    def _engines_for(self, plan: Plan) -> list[Engine]:
        """All that are alive, or those of the plan that came back without the served weights."""
        if not plan.engine_ids:
            if engines := self._fleet.alive():
                return engines
            raise Unavailable("no engine is alive to receive weights; they are being started", retry_after_seconds=2.0)
        if plan.policy_version != self._fleet.policy_version:
            raise FailedPrecondition(
                f"version {plan.policy_version} for {list(plan.engine_ids)} alone, but {self._fleet.policy_version} is "
                "served: publish it to all engines"
            )
        waiting = [e for e in self._fleet.engines if e.state is EngineState.STALE and e.engine_id in plan.engine_ids]
        if missing := set(plan.engine_ids) - {engine.engine_id for engine in waiting}:
            raise FailedPrecondition(f"{sorted(missing)} do not wait for weights: ask GetFleet who does")
        return waiting

    async def _make_room(self, plan: Plan) -> None:
        if not self.open_id:
            return
        other = self._publications[self.open_id].transaction.plan
        if plan.epoch <= other.epoch:
            raise FailedPrecondition(f"publication {other.publication_id} is open: commit or abort it first")
        await self.abort(other.publication_id, f"a trainer with the newer epoch {plan.epoch} began another one")

    def _remember(self, publication: Publication) -> None:
        self._publications[publication.transaction.plan.publication_id] = publication
        while len(self._publications) > _REMEMBERED:
            del self._publications[next(iter(self._publications))]

    def _find(self, publication_id: str) -> Publication:
        if publication_id not in self._publications:
            raise NotFound(f"there is no publication {publication_id!r}: begin it first")
        return self._publications[publication_id]

    async def _prepare(self, publication: Publication) -> None:
        """Groups first, while requests go on; then the pause and the update session."""
        plan = publication.transaction.plan
        if not plan.engine_ids:
            await self._leave_old_groups(publication)
        for group, alive in zip(plan.groups, publication.begun.group_alive, strict=True):
            if not alive:
                await self._join(publication, group)
        publication.paused_at = time.monotonic()
        await self._on_all(publication, lambda engine: engine.client.pause(plan.pause_mode))
        await self._on_all(publication, lambda engine: self._open_session(publication, engine))

    async def _join(self, publication: Publication, group: GroupPlan) -> None:
        plan = publication.transaction.plan
        offsets: dict[str, int] = {}
        rank = 1
        for engine_id, engine in publication.engines.items():
            offsets[engine_id] = rank
            rank += engine.tensor_parallel_size

        async def join(engine: Engine) -> None:
            place = GroupJoin(
                name=group.name,
                master_address=group.master_address,
                master_port=group.master_port,
                rank_offset=offsets[engine.engine_id],
                world_size=publication.begun.world_size,
                backend=plan.backend,
            )
            await self._groups.join(engine, place, seconds=publication.seconds_left())

        await self._on_all(publication, join)
        self._groups.formed(group.name, list(publication.engines.values()))

    async def _leave_groups(self, publication: Publication) -> None:
        """The groups of a few engines serve once; the next publication is for all of them again."""
        names = publication.transaction.plan.group_names
        self._groups.forget(names)
        for engine in publication.remaining:
            await self._groups.leave(engine, names)

    async def _leave_old_groups(self, publication: Publication) -> None:
        """The trainer has given up groups that it does not name any more."""
        if gone := self._groups.others(publication.transaction.plan.groups):
            await self._on_all(publication, lambda engine: self._groups.leave(engine, gone))
            self._groups.forget(gone)

    async def _open_session(self, publication: Publication, engine: Engine) -> None:
        await engine.client.begin_weight_update()
        publication.in_session.add(engine.engine_id)

    async def _prepared(self, publication: Publication) -> None:
        assert publication.preparing is not None
        try:
            await asyncio.shield(publication.preparing)
        except asyncio.CancelledError:
            publication.transaction.require_open()  # an abort cancelled it; say so
            raise
        publication.transaction.require_open()

    async def _receive(self, publication: Publication, bucket: int) -> tuple[str, ...]:
        transaction = publication.transaction
        async with publication.lock:
            await self._prepared(publication)
            transaction.touch(bucket)
            group, tensors = transaction.plan.group_of(bucket), transaction.plan.buckets[bucket]
            await self._on_all(
                publication,
                lambda e: e.client.receive_bucket(group.name, tensors, seconds=publication.seconds_left()),
            )
            transaction.require_open()
            transaction.received.add(bucket)
        return tuple(sorted(transaction.lost))

    async def _commit(self, publication: Publication, checksums: Mapping[str, str], canary: Canary | None) -> Committed:
        transaction = publication.transaction
        await self._on_all(publication, lambda engine: engine.client.end_weight_update())
        publication.in_session.clear()
        digests = await self._verify(publication, checksums)
        transaction.require_open()
        version = transaction.plan.policy_version
        await self._on_all(publication, lambda engine: engine.client.set_weight_version(version))
        await self._on_all(publication, lambda engine: engine.client.flush_cache())
        await self._on_all(publication, lambda engine: engine.client.resume())
        if canary:
            await self._on_all(
                publication, lambda engine: canary.ask(engine.client, version, seconds=publication.seconds_left())
            )
        if transaction.plan.engine_ids:
            await self._leave_groups(publication)
        transaction.commit()
        self._end_timer(publication)
        assert publication.paused_at is not None
        paused_seconds = time.monotonic() - publication.paused_at
        await self._fleet.switch_to(version)
        for engine in publication.remaining:
            engine.weights_digest = digests[engine.engine_id]
            await self._fleet.serve(engine, version)
        log.info("published", policy_version=version, paused_seconds=round(paused_seconds, 3), lost=transaction.lost)
        served = tuple(transaction.remaining)
        return Committed(served, digests[served[0]], tuple(sorted(transaction.lost)), paused_seconds)

    async def _verify(self, publication: Publication, expected: Mapping[str, str]) -> dict[str, str]:
        """Digests by engine id; engines that hold something else are lost."""
        digests: dict[str, str] = {}
        wrong: dict[str, str] = {}

        async def check(engine: Engine) -> None:
            ranks = await engine.client.checksums(seconds=publication.seconds_left())
            digests[engine.engine_id] = digest(ranks)
            if difference := differences(expected, ranks) if expected else None:
                wrong[engine.engine_id] = difference

        await self._on_all(publication, check)
        right = {digests[i] for i in publication.transaction.remaining if i not in wrong}
        if len(right) != 1:
            why = "; ".join(f"{i}: {w}" for i, w in wrong.items()) or f"engines differ from each other: {digests}"
            await self.abort(publication.transaction.plan.publication_id, why)
            raise ChecksumMismatch(f"the weights did not arrive as they were sent: {why}")
        for engine_id, why in wrong.items():
            await self._lose(publication, engine_id, why)
        return digests

    async def _on_all(self, publication: Publication, act: Callable[[Engine], Awaitable[object]]) -> None:
        """Acts on all remaining engines; those that fail are lost. Raises PublicationAborted when none is left."""
        tasks = {asyncio.ensure_future(act(engine)): engine for engine in publication.remaining}
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=_STRAGGLER_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
        failures = [(engine, _failure(task)) for task, engine in tasks.items()]
        for engine, why in failures:
            if why is not None:
                await self._lose(publication, engine.engine_id, why)

    async def _lose(self, publication: Publication, engine_id: str, why: str) -> None:
        engine = publication.engines[engine_id]
        try:
            publication.transaction.lose(engine_id, why)
        except PublicationAborted:
            await self._clean_up(publication)
            raise
        if engine.state is EngineState.UPDATING:
            await self._fleet.give_up(engine, why)

    async def _expire(self, publication: Publication) -> None:
        await asyncio.sleep(publication.transaction.plan.deadline_seconds)
        plan = publication.transaction.plan
        await self.abort(plan.publication_id, f"not committed within {plan.deadline_seconds:g} s")

    async def _clean_up(self, publication: Publication) -> None:
        """After an abort: untouched engines go on as before, all others are ended and start again."""
        transaction = publication.transaction
        log.warning("publication_aborted", publication_id=transaction.plan.publication_id, why=transaction.why_aborted)
        self._end_timer(publication)
        hangs = await _still_runs(publication.preparing)
        self._groups.forget(transaction.plan.group_names)
        await asyncio.gather(*(self._settle(publication, e, hangs) for e in publication.engines.values()))

    async def _settle(self, publication: Publication, engine: Engine, hangs: bool) -> None:
        if engine.state is not EngineState.UPDATING:
            return
        transaction = publication.transaction
        if transaction.touched or hangs or engine.engine_id in transaction.lost:
            await self._fleet.give_up(engine, f"publication aborted: {transaction.why_aborted}")
            return
        try:
            await self._groups.leave(engine, transaction.plan.group_names)
            if engine.engine_id in publication.in_session:
                await engine.client.end_weight_update()
            await engine.client.resume()
            await self._fleet.serve(engine, publication.versions_before[engine.engine_id])
        except HeadraceError as error:
            await self._fleet.give_up(engine, f"did not come back from an aborted publication: {error.message}")

    def _end_timer(self, publication: Publication) -> None:
        if publication.timer is not None and publication.timer is not asyncio.current_task():
            publication.timer.cancel()


async def _still_runs(preparing: asyncio.Task[None] | None) -> bool:
    """True when an engine hangs in joining a group, and is therefore lost."""
    if preparing is None or preparing is asyncio.current_task():
        return False
    await asyncio.wait([preparing], timeout=_STRAGGLER_SECONDS)
    hangs = not preparing.done()
    preparing.cancel()
    return hangs


def _failure(task: asyncio.Future[object]) -> str | None:
    if not task.done() or task.cancelled():
        return "it did not finish when another engine had failed"
    error = task.exception()
    if error is None:
        return None
    return error.message if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
