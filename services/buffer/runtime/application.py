"""The ledger in time and on disk: commands run on the event loop, transactions to the journal, waits end on change.

Unblocked by: a change of the stream (waiting leases and batches), the journal (answers), the lease timer (lost leases).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from headrace.api.sample.v1.sample_pb2 import SampleEnvelope
from headrace.errors import ResourceExhausted, RetryableError
from headrace.hooks.buffer_filter import pack_groups
from headrace.limits import MAX_COLUMN_BYTES, MAX_STREAM_NAMES, MAX_STREAMS
from headrace.protobuf import Payload
from headrace.rpc.log import log
from headrace.trajectory import check_payload
from services.buffer import wire
from services.buffer.blocking import BlockingPool, paced
from services.buffer.ledger.group import Group, GroupState, NewSample, Prompt, SampleRecord, cut, sample_chunks
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.produce import GroupPut, NoLeaseReason, PutResult, Release, check_submit
from services.buffer.ledger.stream import StreamConfig, StreamState, check_config
from services.buffer.ledger.train import StepBatch, candidates, commit_steps, is_starved, rewind_steps
from services.buffer.ledger.work import MAX_CHANGES
from services.buffer.payload import check_samples
from services.buffer.prompts.files import PromptFiles
from services.buffer.runtime.commit import Committer, Pulse, now
from services.buffer.runtime.journal import EventStream, Journal
from services.buffer.runtime.prompt_sources import Locks, PromptReading, PromptSources
from services.buffer.runtime.user_code import GroupChooser, UserCode
from services.buffer.store.base import CopiedFile, Damage, Store
from services.buffer.store.columns import Columns

_CHUNK_BYTES = 1 << 20
_SMALL_BYTES = 8 << 10
"""Payloads up to here are checked on the event loop."""
_CHECKED_BYTES = 64 << 10
"""Bytes of payloads and envelopes that are checked before other work runs."""
_SUBMITTED_AT_ONCE = 2_048
_LOOKED_UP_AT_ONCE = 2_048
_OPENING_SECONDS = 30.0
"""How long the start waits for prompt files; a file that never answers does not stop it."""
NO_USER_CODE = UserCode()
NO_PROMPT_FILES = PromptFiles()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a file."""

    file: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Digest:
    """The end of a file, with its size and SHA-256."""

    file: str
    num_bytes: int
    sha256: bytes


class SampleIntake:
    """Checks samples, and that `min_free_disk_bytes` of the store's disk stay free."""

    def __init__(self, ledger: Ledger, store: Store, min_free_disk_bytes: int) -> None:
        self._ledger = ledger
        self._store = store
        self._min_free_disk_bytes = min_free_disk_bytes
        self._hashers = BlockingPool("payload-hasher", 4)

    async def check(self, samples: Sequence[tuple[str, NewSample]]) -> None:
        """Checks samples, each with its group's id. Large payloads are hashed in a thread, which also asks the disk.

        A thread costs more than it saves for small ones, as it shares the interpreter with the event loop; large ones
        on the loop would delay lease renewals. Raises what is wrong with a sample, and ResourceExhausted.
        """
        if not samples:
            return
        large = [one for one in samples if len(one[1].payload) > _SMALL_BYTES]
        await self._hashers.run(self._check_in_thread, large)
        small = samples if not large else [one for one in samples if len(one[1].payload) <= _SMALL_BYTES]
        for some in cut(small, lambda one: len(one[1].payload) + len(one[1].record.envelope), _CHECKED_BYTES):
            self._check(some)
            await asyncio.sleep(0)

    async def require_disk(self) -> None:
        """Raises ResourceExhausted when the disk is nearly full: consume and commit need the rest."""
        await self._hashers.run(self._require_disk)

    def _check_in_thread(self, samples: Sequence[tuple[str, NewSample]]) -> None:
        self._require_disk()
        self._check(samples)

    def _check(self, samples: Sequence[tuple[str, NewSample]]) -> None:
        for _, sample in samples:
            record = sample.record
            check_payload(record.sample_id, record.digest, record.payload_bytes, sample.payload)
        for config, some in groupby(samples, lambda one: self._ledger.config_of(one[0])):
            parsed = ((SampleEnvelope.FromString(s.record.envelope), s.payload) for _, s in some)
            check_samples(parsed, config.vocab_size if config else None)

    def _require_disk(self) -> None:
        free = self._store.free_bytes()
        if free is not None and free < self._min_free_disk_bytes:
            raise ResourceExhausted(
                f"the ledger's disk has {free} bytes left, min_free_disk_bytes is {self._min_free_disk_bytes}: free "
                "some, or save checkpoints, after which samples are deleted",
                reason="DISK_RESERVE",
                retry_after_seconds=5.0,
            )


class BufferApplication:
    """The ledger at work, with its store, prompt sources and timers. `open` creates it."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        journal: Journal,
        sources: PromptSources,
        columns: Columns,
        *,
        max_watch_lag: int,
        min_free_disk_bytes: int,
    ) -> None:
        self.ledger = ledger
        self.journal = journal
        self.sources = sources
        self.columns = columns
        """Columns that are too large for a message."""
        self._store = store
        self._intake = SampleIntake(ledger, store, min_free_disk_bytes)
        self._committer = Committer(ledger, journal, columns)
        self.commit = self._committer.commit
        self._reading = PromptReading(self._committer, sources, store, self._intake.check)
        self._committer.listeners.append(self._reading.generated)
        self.events = EventStream(journal, store, max_watch_lag)
        self._chooser: GroupChooser | None = None
        self._choosing = Locks()
        self._changing = Locks()
        """Locks of commands that go on in several transactions, by stream."""
        self._deleting: set[asyncio.Task[None]] = set()
        self._payload_readers = BlockingPool("payload-reader", 4)
        self._copiers = BlockingPool("backup", 1)
        self.pulse = Pulse(self._committer, store, journal)

    @classmethod
    async def open(
        cls,
        store: Store,
        *,
        columns_folder: Path | None = None,
        user_code: UserCode = NO_USER_CODE,
        prompt_files: PromptFiles = NO_PROMPT_FILES,
        max_column_bytes: int = MAX_COLUMN_BYTES,
        max_watch_lag: int = 100_000,
        min_free_disk_bytes: int = 0,
        retain_events: int | None = None,
    ) -> BufferApplication:
        """Loads the store and starts the lease timer. A missing prompt file stops its own stream only."""
        snapshot = await asyncio.to_thread(store.load)
        for damage in store.damage():
            log.error("ledger_damaged", what=damage.what, group_id=damage.group_id, sample_id=damage.sample_id)
        if snapshot.torn_bytes:
            log.warning("torn_tail_cut", num_bytes=snapshot.torn_bytes)
        ledger = Ledger(snapshot.ledger_id, retain_events=retain_events)
        ledger.restore(
            now(),
            snapshot.streams,
            snapshot.groups,
            snapshot.position,
            snapshot.oldest_position,
            snapshot.lost_streams,
            snapshot.lost_groups,
        )
        for problem in ledger.problems:
            log.error("ledger_damaged", what=problem)
        columns = Columns(columns_folder, max_bytes=max_column_bytes)
        await columns.restore(snapshot.groups)
        sources = PromptSources(user_code, prompt_files)
        buffer = cls(
            store,
            ledger,
            Journal(store, snapshot.position, snapshot.oldest_position),
            sources,
            columns,
            max_watch_lag=max_watch_lag,
            min_free_disk_bytes=min_free_disk_bytes,
        )
        buffer._chooser = await user_code.chooser()
        opening = [task for indexed in ledger.streams.values() if (task := sources.resume(indexed.state))]
        if opening:
            await asyncio.wait(opening, timeout=_OPENING_SECONDS)
        for stream in list(ledger.leftovers):
            buffer._purge_deleted(stream)
        buffer.pulse.start()
        return buffer

    async def close(self) -> None:
        """Waits for commits on their way, but not for a store that is away: nobody was told that those are durable."""
        for task in self._deleting:
            task.cancel()
        self.pulse.stop()
        self.columns.close()
        if self._store.waiting_for:
            self._store.stop_waiting()
        await self.journal.close()
        await self.sources.close()
        if self._chooser:
            await self._chooser.close()
        await asyncio.to_thread(self._store.close)

    async def create_stream_of_client(self, config: StreamConfig) -> tuple[StreamConfig, bool]:
        """Returns (config, True if new). Raises InvalidArgument for files that clients may not name."""
        check_config(config)
        paths = [await self.sources.path_of_client(file.path) for file in config.files]
        files = tuple(replace(file, path=path) for file, path in zip(config.files, paths, strict=True))
        known = config.name in self.ledger.streams
        names = {*self.ledger.streams, *self.ledger.deleted, config.name}
        if not known and (len(self.ledger.streams) >= MAX_STREAMS or len(names) > MAX_STREAM_NAMES):
            raise ResourceExhausted(
                f"there are {len(self.ledger.streams)} streams, {MAX_STREAMS} is the most, and {len(names) - 1} names, "
                f"{MAX_STREAM_NAMES} is the most: delete streams, or use a name again"
            )
        return await self.create_stream(replace(config, files=files))

    async def create_stream(self, config: StreamConfig) -> tuple[StreamConfig, bool]:
        """Returns (config, True if new)."""
        check_config(config)
        async with self.sources.locks[config.name]:
            is_new = config.name not in self.ledger.streams
            state = await self.sources.begin(config) if is_new else StreamState(config)
            return config, await self.commit(Ledger.create_stream, state)

    async def set_limits(self, limits: StreamConfig) -> None:
        """Changes an existing stream's limits, for the operator, and nothing else."""
        check_config(limits)
        if limits.name in self.ledger.streams:
            await self.commit(Ledger.set_limits, limits)

    async def delete_stream(self, stream: str, *, force: bool, stream_id: str | None = None) -> bool:
        """Returns True when the stream existed; its groups are deleted in chunks."""
        async with self.sources.locks[stream], self._changing[stream]:
            deleted = await self.commit(Ledger.delete_stream, stream, force=force, stream_id=stream_id)
            if deleted:
                await self.sources.close_stream(stream)
                self._purge_deleted(stream)
        return deleted

    def _purge_deleted(self, stream: str) -> None:
        """Another stream may have the name by then: leftovers are nobody's, and their ids are not used again."""

        async def purge() -> None:
            while stream in self.ledger.leftovers and not self.journal.failed.done():
                with suppress(RetryableError):  # the store is away, and will hear of it
                    await self.commit(Ledger.purge_deleted, stream)

        task = asyncio.create_task(purge())
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)

    async def submit(self, stream: str, prompts: Sequence[Prompt], *, stream_id: str | None = None) -> list[str]:
        """Returns one group id for each prompt."""
        group_ids: list[str] = []
        async with self._changing[stream]:
            self.ledger.require_same(stream, stream_id)
            check_submit(self.ledger.stream(stream), prompts)
            for first in range(0, len(prompts), _SUBMITTED_AT_ONCE):
                some = prompts[first : first + _SUBMITTED_AT_ONCE]
                group_ids += await self.commit(Ledger.submit, stream, some)
        return group_ids

    async def lease(
        self,
        stream: str,
        producer_id: str,
        request_id: str,
        max_groups: int,
        wait_seconds: float,
        known_version: int,
        *,
        stream_id: str | None = None,
    ) -> tuple[list[Group], NoLeaseReason | None]:
        """Returns leased groups, or why there are none; at once when the oldest wanted version is above the known."""
        same_id = stream_id or self.ledger.stream_id(stream)

        async def attempt() -> list[Group] | None:
            self.ledger.require_same(stream, same_id)
            await self._reading.read(stream, max_groups)
            self.ledger.require_same(stream, same_id)
            groups = await self.commit(Ledger.lease, stream, producer_id, request_id, max_groups)
            return groups or ([] if indexed.oldest_wanted() > known_version else None)

        indexed = self.ledger.stream(stream)
        groups = await self._committer.wait(stream, attempt, wait_seconds) or []
        return groups, None if groups else self.ledger.no_lease_reason(stream)

    async def release(self, releases: Sequence[Release]) -> None:
        partials = [sample for release in releases for sample in release.partials]
        await self._intake.check([(r.lease_id.rpartition("#")[0], sample) for r in releases for sample in r.partials])
        self.columns.require(partials)
        await self.commit(Ledger.release, releases)

    async def put(self, puts: Sequence[GroupPut]) -> list[PutResult]:
        """Returns once the puts are durable. A nearly full disk refuses them: consume and commit need the rest."""
        samples = [sample for put in puts for sample in put.samples]
        await self._intake.check([(put.group_id, sample) for put in puts for sample in put.samples])
        self.columns.require(samples)
        return await self.commit(Ledger.put, puts)

    async def lease_batch(
        self, stream: str, epoch: int, step: int, wait_seconds: float, *, stream_id: str | None = None
    ) -> tuple[StepBatch | None, int]:
        """Returns the batch (or None), and how many groups are READY."""
        same_id = stream_id or self.ledger.stream_id(stream)

        async def attempt() -> StepBatch | None:
            self.ledger.require_same(stream, same_id)
            batch = await self.commit(Ledger.lease_batch, stream, epoch, step)
            if batch is None and is_starved(self.ledger.stream(stream)):
                self.sources.require(self.ledger.stream(stream).state)
            if batch is None and self._chooser:
                return await self._choose(self._chooser, stream, epoch, step)
            return batch

        batch = await self._committer.wait(stream, attempt, wait_seconds)
        return batch, self.ledger.stream(stream).counts[GroupState.READY]

    async def _choose(self, chooser: GroupChooser, stream: str, epoch: int, step: int) -> StepBatch | None:
        async with self._choosing[stream]:
            indexed = self.ledger.stream(stream)
            if not (groups := candidates(indexed, step)):
                return None
            with chooser.folder() as folder:
                packed = folder / "groups"
                await self._payload_readers.run(pack_groups, packed, map(self._packed, groups))
                chosen, dropped = await chooser.choose(step, packed, indexed.state.config.groups_per_step)
            ids = [[groups[i].group_id for i in indices] for indices in (chosen, dropped)]
            # A stream that was deleted meanwhile, and created again, is at another epoch.
            return await self.commit(Ledger.choose, stream, epoch, step, ids[0], ids[1])

    def _packed(self, group: Group) -> list[bytes]:
        """Serializes a group's samples for the user's function. Runs in a thread."""
        samples = zip(group.samples, self._store.read_payloads(group.samples), strict=True)
        return [wire.sample_to_proto(record, payload).SerializeToString() for record, payload in samples]

    async def commit_step(self, stream: str, epoch: int, step: int, *, stream_id: str | None = None) -> int:
        """Returns the number of groups that became COMMITTED."""
        num_groups = 0
        async with self._changing[stream]:
            self.ledger.require_same(stream, stream_id)
            for until in commit_steps(self.ledger.stream(stream), epoch, step):
                num_groups += await self.commit(Ledger.commit, stream, epoch, until)
            while await self.commit(Ledger.delete_ended, stream) == MAX_CHANGES:
                pass
        return num_groups

    async def rewind(
        self, stream: str, step: int, request_id: str, least_epoch: int, *, stream_id: str | None = None
    ) -> tuple[int, int]:
        """Returns (new epoch, groups that are READY again)."""
        num_back = 0
        async with self._changing[stream]:
            self.ledger.require_same(stream, stream_id)
            for until in rewind_steps(self.ledger.stream(stream), step, request_id, least_epoch):
                _, num_back = await self.commit(Ledger.rewind, stream, until, None, 0, num_back)
            return await self.commit(Ledger.rewind, stream, step, request_id, least_epoch, num_back)

    async def set_policy_version(
        self, stream: str, epoch: int, policy_version: int, *, stream_id: str | None = None
    ) -> int:
        """Returns the number of groups that expired."""
        num_expired, some = 0, MAX_CHANGES
        while some == MAX_CHANGES:
            self.ledger.require_same(stream, stream_id)
            some = await self.commit(Ledger.set_policy_version, stream, epoch, policy_version)
            num_expired += some
        return num_expired

    async def payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        """Reads payloads and checks them against their digests."""
        return await self._payload_readers.run(self._store.read_payloads, records)

    async def fetch(
        self, stream: str, sample_ids: Sequence[str], *, skip_unknown: bool
    ) -> AsyncIterator[list[tuple[SampleRecord, Payload]]]:
        """Yields samples in the order asked, in chunks."""
        found: list[SampleRecord] = []
        async for first in paced(range(0, len(sample_ids), _LOOKED_UP_AT_ONCE)):
            some = sample_ids[first : first + _LOOKED_UP_AT_ONCE]
            found += self.ledger.sample_records(stream, some, skip_unknown=skip_unknown)
        for records in sample_chunks(found):
            yield list(zip(records, await self.payloads(records), strict=True))

    async def backup(self) -> AsyncIterator[Chunk | Digest]:
        """Yields the chunks of every file of a copy, each file's Digest behind them.

        The store copies at one moment, at least everything up to the durable position, while the ledger goes on; the
        columns are asked for once the copy is made, so that none is missing that it names. Raises FailedPrecondition
        for a store without files.
        """
        self.columns.pin_all()
        copy = self._store.copy()
        try:
            files = await self._copiers.run(copy.__enter__)
            try:
                for file in (*files, *await self._copiers.run(self.columns.files)):
                    async for part in self._copied(file):
                        yield part
            finally:
                await self._copiers.run(copy.__exit__, None, None, None)
        finally:
            self.columns.unpin_all()

    async def _copied(self, file: CopiedFile) -> AsyncIterator[Chunk | Digest]:
        digest = hashlib.sha256()
        with file.path.open("rb") as source:
            for offset in range(0, file.num_bytes, _CHUNK_BYTES):
                data = await self._copiers.run(source.read, min(_CHUNK_BYTES, file.num_bytes - offset))
                await self._copiers.run(digest.update, data)
                yield Chunk(file.name, offset, data)
        yield Digest(file.name, file.num_bytes, digest.digest())

    async def upload_column(self, sha256: bytes, num_bytes: int, offset: int, data: bytes) -> tuple[int, bool]:
        """Returns (next offset, True once the column is durable). It is refused when the disk is nearly full."""
        await self._intake.require_disk()
        return await self.columns.upload(sha256, num_bytes, offset, data)

    def damage(self) -> Sequence[Damage]:
        """Returns everything that was found damaged so far."""
        return [*self._store.damage(), *map(Damage, self.ledger.problems), *self.columns.damage()]

    @property
    def store_name(self) -> str:
        """The kind of store, as the job names it."""
        return self._store.name

    async def wait_until_durable(self) -> None:
        await self._committer.wait_until_durable()
