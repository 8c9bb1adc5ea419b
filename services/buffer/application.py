"""The ledger in time and on disk: commands run on the event loop, transactions to the journal, waits end on change.

Unblocked by: a change of the stream (waiting leases and batches), the journal (answers), the lease timer (lost leases).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from headrace.errors import FailedPrecondition, OutOfRange, ResourceExhausted
from headrace.rpc.log import log
from services.buffer.backup import Chunk, Digest, stream_copy
from services.buffer.group import Group, GroupState, Prompt, SampleRecord
from services.buffer.journal import Journal
from services.buffer.ledger import Ledger, Result
from services.buffer.producing import GroupPut, NoLeaseReason, PutResult, Release
from services.buffer.prompts.mix import PromptMix
from services.buffer.prompts.open import open_prompts
from services.buffer.signal import Signal, wait_for
from services.buffer.store.base import Store
from services.buffer.stream import StreamConfig, StreamState
from services.buffer.training import Batch
from services.buffer.transaction import Instant, LedgerEvent, Transaction

_Answer = TypeVar("_Answer")

_EVENTS_PER_PAGE = 1_000
_FETCH_BYTES = 3 << 20


class Buffer:
    """One ledger, alive. Made by `open`."""

    def __init__(
        self, store: Store, ledger: Ledger, journal: Journal, *, max_watch_lag: int, min_free_disk_bytes: int
    ) -> None:
        self.ledger = ledger
        self.journal = journal
        self._store = store
        self._max_watch_lag = max_watch_lag
        self._min_free_disk_bytes = min_free_disk_bytes
        self._changed: defaultdict[str, Signal] = defaultdict(Signal)
        self._leased = Signal()
        self._sources: dict[str, PromptMix] = {}
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._timer: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, store: Store, *, max_watch_lag: int = 100_000, min_free_disk_bytes: int = 0) -> Buffer:
        """Loads what the store kept and starts the lease timer. Raises when a prompt file is gone or another one."""
        snapshot = await asyncio.to_thread(store.load)
        for record in snapshot.quarantined:
            log.error("record_quarantined", record=record)
        if snapshot.torn_bytes:
            log.warning("torn_tail_cut", num_bytes=snapshot.torn_bytes)
        ledger = Ledger(snapshot.ledger_id)
        ledger.restore(_now(), snapshot.streams, snapshot.groups, snapshot.position)
        buffer = cls(
            store,
            ledger,
            Journal(store, snapshot.position),
            max_watch_lag=max_watch_lag,
            min_free_disk_bytes=min_free_disk_bytes,
        )
        for state in snapshot.streams:
            if state.config.has_source:
                buffer._sources[state.name] = await _reopen(state)
        buffer._timer = asyncio.create_task(buffer._expire_leases())
        return buffer

    async def close(self) -> None:
        """Waits for what is being written."""
        if self._timer:
            self._timer.cancel()
        await self.journal.close()
        for source in self._sources.values():
            await source.close()
        await asyncio.to_thread(self._store.close)

    async def create_stream(self, config: StreamConfig) -> tuple[StreamConfig, bool]:
        """(config, created)."""
        async with self._reading[config.name]:
            state = StreamState(config)
            if config.has_source and config.name not in self.ledger.books:
                mix = await asyncio.to_thread(open_prompts, config)
                digests, cursors = mix.digests, mix.start()
                state = replace(state, bad_lines=mix.bad_lines, file_digests=digests, cursors=cursors)
                self._sources[config.name] = mix
            return config, await self._commit(self.ledger.create_stream(_now(), state))

    async def set_limits(self, limits: StreamConfig) -> None:
        """The operator's way to change a stream that is there: its limits, and nothing else."""
        if limits.name in self.ledger.books:
            await self._commit(self.ledger.set_limits(_now(), limits))

    async def submit(self, stream: str, prompts: Sequence[Prompt]) -> list[str]:
        """Group ids, one for each prompt."""
        return await self._commit(self.ledger.submit(_now(), stream, prompts))

    async def lease(
        self, stream: str, producer_id: str, request_id: str, max_groups: int, wait_seconds: float
    ) -> tuple[list[Group], NoLeaseReason | None]:
        """Leased groups, or why there are none."""

        async def attempt() -> list[Group] | None:
            await self._read_prompts(stream, max_groups)
            result = self.ledger.lease(_now(), stream, producer_id, request_id, max_groups)
            if result[0]:
                self._leased.set()
            return await self._commit(result) or None

        self.ledger.book(stream)
        groups = await self._wait(stream, attempt, wait_seconds) or []
        return groups, None if groups else self.ledger.no_lease_reason(stream)

    async def _read_prompts(self, stream: str, max_groups: int) -> None:
        async with self._reading[stream]:
            count = self.ledger.prompts_wanted(stream, max_groups)
            if not count:
                return
            cursors = self.ledger.book(stream).state.cursors
            reading = await self._sources[stream].read(cursors, count)
            result = self.ledger.read(_now(), stream, reading.prompts, reading.cursors, reading.exhausted)
            # Not waited for: the lease that follows is behind it in the journal.
            _ = self.journal.append(result[1])

    def lease_seconds_left(self, lease_id: str) -> float:
        """Of a live lease."""
        return self.ledger.lease_seconds_left(_now(), lease_id)

    def renew(self, lease_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """(renewed, lost)."""
        return self.ledger.renew(_now(), lease_ids)

    async def release(self, releases: Sequence[Release]) -> None:
        """Groups go back to the queue."""
        if any(r.partials for r in releases):
            self._require_disk()
        await self._commit(self.ledger.release(_now(), releases))

    async def put(self, puts: Sequence[GroupPut]) -> list[PutResult]:
        """Durable when it returns. Refused where it would fill the disk: consume and commit need what is left."""
        if any(p.samples for p in puts):
            self._require_disk()
        return await self._commit(self.ledger.put(_now(), puts))

    async def lease_batch(self, stream: str, epoch: int, step: int, wait_seconds: float) -> tuple[Batch | None, int]:
        """The batch, and how many groups are READY."""

        async def attempt() -> Batch | None:
            return await self._commit(self.ledger.lease_batch(_now(), stream, epoch, step))

        self.ledger.book(stream)
        batch = await self._wait(stream, attempt, wait_seconds)
        return batch, self.ledger.book(stream).counts[GroupState.READY]

    async def consume(self, stream: str, epoch: int, step: int, digest: bytes) -> int:
        """The step after it."""
        return await self._commit(self.ledger.consume(_now(), stream, epoch, step, digest))

    async def commit(self, stream: str, epoch: int, step: int) -> int:
        """Groups committed."""
        return await self._commit(self.ledger.commit(_now(), stream, epoch, step))

    async def rewind(self, stream: str, step: int, request_id: str, least_epoch: int) -> tuple[int, int]:
        """(epoch, groups that came back)."""
        return await self._commit(self.ledger.rewind(_now(), stream, step, request_id, least_epoch))

    async def set_policy_version(self, stream: str, epoch: int, policy_version: int) -> int:
        """Groups that expired by it."""
        return await self._commit(self.ledger.set_policy_version(_now(), stream, epoch, policy_version))

    async def payloads(self, records: Sequence[SampleRecord]) -> list[bytes]:
        """Checked against their digests."""
        return await asyncio.to_thread(self._store.read_payloads, records)

    async def fetch(
        self, stream: str, sample_ids: Sequence[str], *, skip_unknown: bool
    ) -> AsyncIterator[list[tuple[SampleRecord, bytes]]]:
        """Samples in the order asked, some at a time."""
        for records in _portions(self.ledger.sample_records(stream, sample_ids, skip_unknown=skip_unknown)):
            yield list(zip(records, await self.payloads(records), strict=True))

    async def list_groups(
        self, stream: str, states: Sequence[GroupState], before: int | None, count: int
    ) -> tuple[list[Group], int | None]:
        """A page, and where the next one starts."""
        page = self.ledger.list_groups(stream, states, before, count)
        await self.settled()
        return page

    async def backup(self) -> AsyncIterator[Chunk | Digest]:
        """A copy with at least everything up to the durable position."""
        async for part in stream_copy(self._store):
            yield part

    @property
    def store_name(self) -> str:
        """The kind of store, as the job says it."""
        return self._store.name

    async def settled(self) -> None:
        """Everything that memory shows is durable."""
        await self.journal.append(Transaction())

    async def watch(self, from_position: int) -> AsyncIterator[list[LedgerEvent]]:
        """The history from a position on, then live. Raises OutOfRange beyond its end, or for a reader left behind."""
        position = max(from_position, 1)
        if position > self.journal.durable_position + 1:
            raise OutOfRange(
                f"position {position} is not written yet: the latest is {self.journal.durable_position}",
                latest_position=str(self.journal.durable_position),
            )
        is_live = False
        while True:
            ticket = self.journal.advanced.ticket()
            lag = self.journal.durable_position + 1 - position
            if is_live and lag > self._max_watch_lag:
                raise OutOfRange(
                    f"this watcher is {lag} events behind, more than {self._max_watch_lag}: "
                    f"read faster, and watch again from position {position}",
                    position=str(position),
                )
            if lag == 0:
                is_live = True
                await ticket.wait()
                continue
            events = await asyncio.to_thread(self._store.read_events, position, _EVENTS_PER_PAGE)
            position = events[-1].position + 1
            yield events

    def _require_disk(self) -> None:
        free = self._store.free_bytes()
        if free is not None and free < self._min_free_disk_bytes:
            raise ResourceExhausted(
                f"the ledger's disk has {free} bytes left, min_free_disk_bytes is {self._min_free_disk_bytes}: free "
                "some, or save checkpoints, after which samples are deleted",
                reason="DISK_RESERVE",
                retry_after_seconds=5.0,
            )

    async def _commit(self, result: Result[_Answer]) -> _Answer:
        answer, transaction = result
        durable = self.journal.append(transaction)
        for name in {e.stream for e in transaction.events}:
            self._changed[name].set()
        await durable
        return answer

    async def _wait(
        self, stream: str, attempt: Callable[[], Awaitable[_Answer | None]], seconds: float
    ) -> _Answer | None:
        end = time.monotonic() + seconds
        while True:
            ticket = self._changed[stream].ticket()
            answer = await attempt()
            left = end - time.monotonic()
            if answer is not None or left <= 0 or not await wait_for(ticket, left):
                return answer

    async def _expire_leases(self) -> None:
        while True:
            ticket = self._leased.ticket()
            result = self.ledger.expire_leases(_now())
            if result[0]:
                await self._commit(result)
                log.info("leases_expired", num_groups=result[0])
            deadline = self.ledger.next_lease_deadline()
            if deadline is None:
                await ticket.wait()
            else:
                await wait_for(ticket, max(deadline - time.monotonic(), 0.0))


def _now() -> Instant:
    return Instant(time.monotonic(), time.time())


def _portions(records: Sequence[SampleRecord]) -> Iterator[list[SampleRecord]]:
    """Cuts where a message would grow beyond gRPC's usual 4 MiB; a larger record is alone."""
    portion: list[SampleRecord] = []
    num_bytes = 0
    for record in records:
        size = record.payload_bytes + len(record.envelope)
        if portion and num_bytes + size > _FETCH_BYTES:
            yield portion
            portion, num_bytes = [], 0
        portion.append(record)
        num_bytes += size
    if portion:
        yield portion


async def _reopen(state: StreamState) -> PromptMix:
    mix = await asyncio.to_thread(open_prompts, state.config)
    pairs = zip(state.config.files, state.cursors, state.file_digests, mix.digests, strict=True)
    for file, cursor, known, digest in pairs:
        if digest != known:
            raise FailedPrecondition(
                f"prompt file {file.path} has changed since stream {state.name} began to walk it, its position in it "
                f"(epoch {cursor.epoch}, row {cursor.row}) means nothing now: put the old file back, or begin "
                "with another --data-dir",
                reason="PROMPT_FILE_CHANGED",
            )
    return mix
