"""Takes the engines through one publication after another: prepares, receives buckets, verifies, flips the version.

Consumes: begin, bucket, commit and abort from the trainer. Waits for: engines, each time with a limit. Unblocked by:
the publication's deadline, which aborts it from inside. Produces: engines that serve the new version, all at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import (
    Aborted,
    BaseGone,
    ChecksumMismatch,
    FailedPrecondition,
    HeadraceError,
    NotFound,
    Unavailable,
)
from headrace.publication import Probe
from headrace.rpc import tracing
from headrace.rpc.log import log
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Activity, Engine, EngineState, Fleet
from services.rollout.publication.publication import CommitResult, Members, Publication
from services.rollout.publication.state import EpochFence, Phase, Plan
from services.rollout.publication.transports import (
    AdapterInbound,
    CollectiveInbound,
    DiskInbound,
    Inbound,
    NoTransfer,
)

# Compares the weights in engines with those that were sent.
# An engine hashes in the thread that generates: it is asked for a slice at a time, and generates between two slices.

_SLICE_BYTES = 64 << 20  # some 50 ms of one core
_MOST_SLICES = 32
_LAYER = re.compile(r".*?\.\d+\.")
_TIED = frozenset({"lm_head.weight"})
"""The output layer: with tied embeddings the sender may send it although the engine does not have it."""


async def read(
    plan: Plan, expected: Mapping[str, str], engine: EngineClient, *, seconds: float
) -> list[dict[str, str]]:
    """Returns name → checksum of every tensor, for each rank of an engine; `seconds` limit each slice."""
    found: list[dict[str, str]] = []
    for skipped in slices(plan) if expected else [[]]:
        ranks = await engine.checksums(skipped=skipped, seconds=seconds)
        found = [old | new for old, new in zip(found, ranks, strict=True)] if found else ranks
    if all(expected.keys() - _TIED <= rank.keys() for rank in found):
        return found
    return await engine.checksums(seconds=seconds)  # a name that contains another slice's is in none


def slices(plan: Plan) -> list[list[str]]:
    """Returns what to leave out of each slice: layers, and names of tensors outside of them.

    With FP8 there is one slice: an engine hashes its FP8 weights whatever it is told to leave out.
    """
    if any(tensor.dtype == "float8_e4m3fn" for tensors in plan.buckets.values() for tensor in tensors):
        return [[]]
    num_bytes: dict[str, int] = {}
    for tensors in plan.buckets.values():
        for tensor in tensors:
            layer = _LAYER.match(tensor.name)
            part = layer[0] if layer else tensor.name
            num_bytes[part] = num_bytes.get(part, 0) + tensor.num_bytes
    most_bytes = max(_SLICE_BYTES, sum(num_bytes.values()) // _MOST_SLICES)
    kept: list[set[str]] = [set()]
    filled = 0
    for part, size in num_bytes.items():
        if kept[-1] and filled + size > most_bytes:
            kept.append(set())
            filled = 0
        kept[-1].add(part)
        filled += size
    return [[part for part in num_bytes if part not in parts] for parts in kept]


def digest(ranks: Sequence[Mapping[str, str]]) -> str:
    """Returns one hexadecimal digest over all ranks' checksums, equal for equal weights."""
    hasher = hashlib.sha256()
    for number, rank in enumerate(ranks):
        for name in sorted(rank):
            hasher.update(f"{number}\0{name}\0{rank[name]}\n".encode())
    return hasher.hexdigest()


def differences(expected: Mapping[str, str], ranks: Sequence[Mapping[str, str]]) -> str | None:
    """Says what differs from the sender's checksums, or returns None. Each rank is compared with all of them."""
    for rank in ranks:
        wrong = [name for name, checksum in expected.items() if name in rank and rank[name] != checksum]
        absent = sorted(expected.keys() - rank.keys() - _TIED)
        if wrong or absent:
            uncovered = sorted(rank.keys() - expected.keys())
            parts = [f"{len(wrong)} of {len(expected)} tensors differ"]
            if wrong:
                name = wrong[0]
                parts.append(f"first {name}: sent {expected[name]}, engine has {rank[name]}")
            if absent:
                parts.append(f"the engine has no {_some(absent)}")
            if uncovered:
                parts.append(f"the sender says nothing about {_some(uncovered)}")
            return "; ".join(parts)
    return None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# Cleanup after an aborted publication.
# clean ──► as before: engines in routing return to it, STALE ones stay STALE
# dirty ──► STALE: they hold a mixture, stay paused with their requests, and wait for the next publication; where they
#           generated with it already, their requests end and go on elsewhere
# gone, hung, or at odds with what was sent ──► DOWN, and started again


async def clean_up(publication: Publication, fleet: Fleet, transport: Inbound) -> None:
    """Returns once every engine is in one of those states."""
    state = publication.state
    log.warning("publication_aborted", publication_id=publication.plan.publication_id, why=state.why_aborted)
    publication.end_timer()
    if publication.preparing is not None:
        publication.preparing.cancel()
    transport.release(publication.plan)
    failed = await publication.participants.failed()
    was_sent = publication.committing is not None and not publication.plan.leaves_served
    if was_sent:  # and is something else
        failed |= publication.participants.engines.keys()
    engines = [e for e in publication.participants.engines.values() if e.state is EngineState.UPDATING]
    ended = await asyncio.gather(
        *(_clean_up_engine(publication, engine, fleet, transport, engine.engine_id in failed) for engine in engines),
        return_exceptions=True,
    )
    for engine, error in zip(engines, ended, strict=True):
        if isinstance(error, Exception):  # it is DOWN, and the others are cleaned up all the same
            log.error("engine_not_stopped", engine=engine.engine_id, exc_info=error)


async def _clean_up_engine(
    publication: Publication, engine: Engine, fleet: Fleet, transport: Inbound, has_failed: bool
) -> None:
    if has_failed:
        await fleet.give_up(engine, f"publication aborted: {publication.state.why_aborted}")
        return
    try:
        await transport.leave(publication.plan, engine)
        await transport.close(publication, engine)
        if engine.engine_id in publication.resumed:
            await engine.client.pause("abort")  # what it made with these weights is made again elsewhere
        if publication.state.dirty or engine.engine_id not in publication.were_ready:
            await fleet.hold_back(engine)
        else:
            await engine.client.resume()
            await fleet.serve(engine, engine.policy_version)
    except Exception as error:  # noqa: BLE001  # whatever it was: an engine that nobody cleans up would be UPDATING until the end
        await fleet.give_up(engine, f"did not come back from an aborted publication: {error}")


async def prepare(publication: Publication, transport: Inbound, activity: Activity) -> None:
    """Every engine that still takes part is paused and open for weights."""
    plan, participants = publication.plan, publication.participants
    await transport.ready(publication)
    if plan.leaves_served:
        return  # nothing comes that they would have to stand still for
    publication.paused_at = time.monotonic()
    if not plan.engine_ids:
        activity.stand_still()
    await participants.each(lambda engine: engine.client.pause(plan.pause_mode))
    await participants.each(lambda engine: transport.open(publication, engine))


# Asks an engine for a probe's log-probs under its new weights.
# Checksums say that the bytes arrived; the probe says that both sides compute the same model (rotary base, norms,
# dtype).


async def ask(probe: Probe, engine: Engine, policy_version: int, *, seconds: float, adapter: str = "") -> None:
    """Raises ChecksumMismatch with both sides' numbers when the engine disagrees.

    A decode engine computes no prompt, so it is not asked: it runs SGLang's code of the same model on the same bytes.
    """
    if engine.worker_type == "decode":
        return
    theirs = await engine.client.score(
        probe.tokens,
        cache_key=f"probe-{policy_version}",
        seconds=seconds,
        adapter=adapter,
        is_prefill=engine.worker_type == "prefill",
    )
    difference = sum(abs(a - b) for a, b in zip(probe.log_probs, theirs, strict=True)) / len(theirs)
    if not difference <= probe.max_mean_difference:  # NaN disagrees too
        raise ChecksumMismatch(
            f"the probe's log-probs differ by {difference:.4g} in the mean, more than "
            f"{probe.max_mean_difference:g}: trainer {_first(probe.log_probs)} …, engine {_first(theirs)} …"
        )


def _first(log_probs: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in log_probs[:3])


_REMEMBERED = 8
T = TypeVar("T")


class Receiver:
    """Runs at most one publication at a time. Weights that come through files lie below `weights_root`."""

    def __init__(self, fleet: Fleet, weights_root: Path | None = None) -> None:
        self._fleet = fleet
        self.fence = EpochFence()
        self._publications: dict[str, Publication] = {}
        self._collective = CollectiveInbound()
        self._disk = DiskInbound(weights_root, self.has_base)
        self.adapters = AdapterInbound(weights_root, fleet)
        self._loaded = NoTransfer()
        self._served_digests: frozenset[str] = frozenset()
        """Of the weights that were committed last: engines of different shapes print different ones."""

    @property
    def open_id(self) -> str:
        """The open publication's id; empty without one."""
        return next((i for i, p in self._publications.items() if p.state.phase is Phase.OPEN), "")

    async def begin(self, plan: Plan) -> Members:
        """Returns at once, or when the engines of an aborted publication are cleaned up; engines then prepare.

        Raises FailedPrecondition while another one is open, and GroupGone for a joined group of other engines.
        """
        self.fence.check(plan.epoch)
        await self._make_room(plan)
        if plan.publication_id in self._publications:
            return self._publications[plan.publication_id].members
        engines = self._with_base(plan, self._engines_for(plan))
        transport = self._transport(plan)
        transport.require_usable(plan, engines)
        members = Members(
            world_size=1 + sum(engine.shape.devices for engine in engines),
            engine_ids=tuple(engine.engine_id for engine in engines),
        )
        publication = Publication(plan, engines, members, self._fleet)
        self._remember(publication)
        for engine in engines:
            engine.state = EngineState.UPDATING
        publication.preparing = self._start(publication, prepare(publication, transport, self._fleet.activity))
        publication.timer = asyncio.create_task(self._expire(publication))
        log.info("publication_begun", publication_id=plan.publication_id, engines=members.engine_ids)
        return members

    async def receive(self, publication_id: str, bucket: int) -> tuple[str, ...]:
        """Returns the engines lost so far, once all others have the bucket. Raises PublicationAborted.

        It goes on when the caller goes away: a broadcast cannot be taken back, and the caller may ask again.
        """
        publication = self._find(publication_id)
        publication.plan.require_bucket(bucket)
        if bucket not in publication.buckets:
            publication.buckets[bucket] = self._start(publication, self._receive(publication, bucket))
        return await asyncio.shield(publication.buckets[bucket])

    async def commit(
        self, publication_id: str, checksums: Mapping[str, str], probe: Probe | None = None
    ) -> CommitResult:
        """Verifies the weights and serves them; requests go on since the last bucket, with what they give held back.

        Raises ChecksumMismatch, and aborts, if no engine passes.
        """
        publication = self._find(publication_id)
        if publication.committing is None:
            publication.state.require_complete()
            publication.committing = self._start(publication, self._commit(publication, checksums, probe))
        return await asyncio.shield(publication.committing)

    async def abort(self, publication_id: str, why: str) -> None:
        """Returns when the engines are cleaned up. It does nothing after a commit."""
        if publication := self._publications.get(publication_id):
            publication.state.abort(why)
            await self._cleaned_up(publication)

    async def close(self, why: str = "the rollout service stops") -> None:
        """Aborts an open publication, and waits for no request to give its adapter back."""
        if self.open_id:
            await self.abort(self.open_id, why)
        await self.adapters.stop()

    def _transport(self, plan: Plan) -> Inbound:
        if plan.is_loaded:
            return self._loaded
        if plan.is_adapter:
            return self.adapters
        return self._collective if plan.folder is None else self._disk

    def _engines_for(self, plan: Plan) -> list[Engine]:
        """Returns all engines that are alive, or those of the plan that came back without the served weights."""
        if not plan.engine_ids:
            if engines := self._fleet.alive():
                return engines
            if not self._fleet.may_start.is_set():  # as after a start in the engines' turn: waiting brings none
                raise Aborted("no engine has memory: the devices are the trainer's", reason="MEMORY_RELEASED")
            raise Unavailable("no engine is alive to receive weights; they are being started", retry_after_seconds=2.0)
        if plan.policy_version != self._fleet.policy_version:
            raise FailedPrecondition(
                f"version {plan.policy_version} for {list(plan.engine_ids)} alone, but {self._fleet.policy_version} is "
                "served: publish it to all engines"
            )
        waiting = [e for e in self._fleet.engines if e.state is EngineState.STALE and e.engine_id in plan.engine_ids]
        if missing := set(plan.engine_ids) - {engine.engine_id for engine in waiting}:
            raise FailedPrecondition(f"{sorted(missing)} do not wait for weights: GetFleet lists the engines that do")
        return waiting

    def _with_base(self, plan: Plan, engines: list[Engine]) -> list[Engine]:
        """Leaves out those that a broadcast delta is of no use to. Raises BaseGone when they are more than half."""
        if plan.delta is None or plan.folder is not None:
            return engines
        able = [engine for engine in engines if self.has_base(plan, engine)]
        if 2 * len(able) < len(engines):
            raise BaseGone(f"{len(able)} of {len(engines)} engines have {plan.delta.base_digest[:16]}: send the whole")
        return able

    def has_base(self, plan: Plan, engine: Engine) -> bool:
        """True for an engine to which the plan's delta can be added."""
        return plan.delta is not None and {plan.delta.base_digest, engine.weights_digest} <= self._served_digests

    async def _make_room(self, plan: Plan) -> None:
        """Waits until other publications are over and cleaned up. Raises FailedPrecondition."""
        while plan.publication_id not in self._publications:
            busy = next((p for p in self._publications.values() if not p.is_over), None)
            if busy is None:
                return
            if busy.state.phase is Phase.OPEN and plan.epoch <= busy.plan.epoch:
                raise FailedPrecondition(f"publication {busy.plan.publication_id} is open: commit or abort it first")
            await self.abort(busy.plan.publication_id, f"a trainer with the newer epoch {plan.epoch} began another one")

    def _remember(self, publication: Publication) -> None:
        self._publications[publication.plan.publication_id] = publication
        while len(self._publications) > _REMEMBERED:
            del self._publications[next(iter(self._publications))]

    def _find(self, publication_id: str) -> Publication:
        if publication_id not in self._publications:
            raise NotFound(f"there is no publication {publication_id!r}: begin it first")
        return self._publications[publication_id]

    def _start(self, publication: Publication, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that cleans up after the publication if it ends it."""

        async def run() -> T:
            try:
                return await work
            except Exception as error:  # whatever it was: the engines must not stay in it until the deadline
                if not isinstance(error, HeadraceError):
                    log.error("publication_raised", publication_id=publication.plan.publication_id, exc_info=error)
                    publication.state.abort(f"{type(error).__name__}: {error}")
                if publication.state.phase is Phase.ABORTED:
                    self._clean_up(publication)
                raise

        task = asyncio.create_task(run())
        task.add_done_callback(_retrieved)
        return task

    def _clean_up(self, publication: Publication) -> asyncio.Task[None]:
        if publication.cleanup is None:
            transport = self._transport(publication.plan)
            publication.cleanup = asyncio.create_task(clean_up(publication, self._fleet, transport))
        return publication.cleanup

    async def _cleaned_up(self, publication: Publication) -> None:
        if publication.state.phase is Phase.ABORTED:
            await asyncio.shield(self._clean_up(publication))

    async def _prepared(self, publication: Publication) -> None:
        assert publication.preparing is not None
        try:
            await asyncio.shield(publication.preparing)
        except asyncio.CancelledError:
            publication.state.require_open()  # an abort cancelled it; say so
            raise
        publication.state.require_open()

    async def _receive(self, publication: Publication, bucket: int) -> tuple[str, ...]:
        state = publication.state
        async with publication.lock:
            await self._prepared(publication)
            state.mark_dirty(bucket)
            await self._transport(state.plan).receive(publication, bucket)
            state.received.add(bucket)
            if state.is_complete and not state.plan.leaves_served:
                await self._resume(publication)
        return tuple(sorted(state.lost))

    async def _resume(self, publication: Publication) -> None:
        """Ends the standstill. What engines generate from now on is held back: their weights' name is PENDING."""
        participants, version = publication.participants, publication.plan.policy_version
        transport = self._transport(publication.plan)
        if not publication.plan.engine_ids:
            self._fleet.weights.cache_apart(version)

        async def resume(engine: Engine) -> None:
            engine.weights_name = self._fleet.weights.new_name(version, engine.engine_id)
            await asyncio.gather(
                transport.close(publication, engine),
                engine.client.name_weights(engine.weights_name),
                engine.client.flush_cache(),
            )
            publication.resumed.add(engine.engine_id)
            await engine.client.resume()
            self._fleet.activity.go_on()
            paused_seconds = time.monotonic() - (publication.paused_at or 0.0)
            facts = {tracing.LANE: engine.engine_id, "headrace.policy_version": version}
            tracing.record("headrace.standstill", tracing.current(), time.time() - paused_seconds, time.time(), facts)

        await participants.each(resume)
        assert publication.paused_at is not None
        publication.paused_seconds = time.monotonic() - publication.paused_at

    async def _commit(
        self, publication: Publication, checksums: Mapping[str, str], probe: Probe | None
    ) -> CommitResult:
        state, participants = publication.state, publication.participants
        version, paused_seconds = state.plan.policy_version, publication.paused_seconds
        digests = await self._verify(publication, checksums)
        state.require_open()
        if probe:
            adapter = self.adapters.name_of(state.plan) if state.plan.is_adapter else ""
            await participants.each(
                lambda engine: ask(probe, engine, version, seconds=publication.seconds_left(), adapter=adapter)
            )
        await self._transport(state.plan).finish(publication)
        await participants.each(_still_there)
        state.commit()
        publication.end_timer()
        if state.plan.is_adapter:
            self.adapters.serve(state.plan)
        else:
            self._fleet.weights.accept(engine.weights_name for engine in participants.remaining)
        await self._fleet.switch_to(version)
        for engine in participants.remaining:
            if engine.state is EngineState.UPDATING:
                engine.weights_digest = digests[engine.engine_id]
                await self._fleet.serve(engine, version)
        log.info("published", policy_version=version, paused_seconds=round(paused_seconds, 3), lost=state.lost)
        served = tuple(state.remaining)
        before = self._served_digests if state.plan.engine_ids else frozenset()
        self._served_digests = before | {digests[engine_id] for engine_id in served}
        busy_share = None if state.plan.engine_ids else self._fleet.activity.lap()
        return CommitResult(served, digests[served[0]], tuple(sorted(state.lost)), paused_seconds, busy_share)

    async def _verify(self, publication: Publication, expected: Mapping[str, str]) -> dict[str, str]:
        """Returns digests by engine id; engines that hold something else are taken out."""
        digests: dict[str, str] = {}
        wrong: dict[str, str] = {}

        async def check(engine: Engine) -> None:
            given = self._transport(publication.plan).checksums(publication)
            ranks = (
                [given]
                if given is not None
                else await read(publication.plan, expected, engine.client, seconds=publication.seconds_left())
            )
            digests[engine.engine_id] = digest(ranks)
            if difference := differences(expected, ranks) if expected else None:
                wrong[engine.engine_id] = difference

        await publication.participants.each(check)
        shape_of = {e.engine_id: e.shape for e in publication.participants.remaining}
        right = {(shape_of[i], digests[i]) for i in publication.state.remaining if i not in wrong}
        if not right or len(right) != len({shape for shape, _ in right}):  # each cuts the weights in its own way
            why = "; ".join(f"{i}: {w}" for i, w in wrong.items()) or f"engines differ from each other: {digests}"
            await self.abort(publication.plan.publication_id, why)
            raise ChecksumMismatch(f"the weights did not arrive as they were sent: {why}")
        for engine_id, why in wrong.items():
            await publication.participants.lose(engine_id, why)
        return digests

    async def _expire(self, publication: Publication) -> None:
        plan = publication.plan
        await asyncio.sleep(plan.deadline_seconds)
        if publication.state.abort(f"not committed within {plan.deadline_seconds:g} s"):
            self._clean_up(publication)


async def _still_there(engine: Engine) -> None:
    """Asked of all at once, it takes out those that are gone (`Participants`)."""


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Prevents a report about a call whose caller went away."""
    if not task.cancelled():
        task.exception()
