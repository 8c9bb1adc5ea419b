"""Prompt sources of the streams: opened once, read in order, brought into the ledger when producers ask for work."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

from msgspec.structs import replace

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.hooks.data_source.generated import Generated, ReuseRequest
from headrace.protobuf import RawSample
from headrace.rpc.log import log
from services.buffer import wire
from services.buffer.blocking import BlockingPool, paced
from services.buffer.ledger.group import Group, GroupState, NewSample, payload_key
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.produce import Finish, NoLeaseReason
from services.buffer.ledger.state import Transaction
from services.buffer.ledger.stream import FileSource, StreamConfig, StreamState, source_names
from services.buffer.prompts.data_source import DataSourceReader, KeptGroups, is_again, origin_group
from services.buffer.prompts.files import IndexedFile, PromptFiles, RowReader, StreamedFile
from services.buffer.prompts.jsonl import JsonlBlocks, lines_or_table, read_jsonl_block
from services.buffer.prompts.reader import MixReading, PromptEntry, PromptMix, PromptReader, ReaderShard, finished_of
from services.buffer.runtime.commit import Committer
from services.buffer.runtime.user_code import UserCode
from services.buffer.store.base import Store
from services.buffer.wire import distinct, to_finished


def open_files(files: Sequence[FileSource], pool: BlockingPool) -> list[PromptReader]:
    """Reads indexed files whole, once. Raises InvalidArgument naming file and line of what cannot be read."""
    return [_reader(RowReader(file, name), pool) for file, name in zip(files, source_names(files), strict=True)]


def open_prompts(config: StreamConfig, data_source: DataSourceReader | None, pool: BlockingPool) -> PromptMix:
    """Opens a stream's prompts, which `pool` reads. A shard gets its part of them."""
    readers: list[PromptReader] = [data_source] if data_source else open_files(config.files, pool)
    if config.num_shards > 1:
        readers = [ReaderShard(reader, config.shard, config.num_shards) for reader in readers]
    return PromptMix(readers)


def _reader(rows: RowReader, pool: BlockingPool) -> PromptReader:
    if not rows.source.path.endswith(".parquet"):
        if rows.source.streaming:
            return StreamedFile(JsonlBlocks(rows), read_jsonl_block, rows, pool)
        return IndexedFile(lines_or_table(rows), rows, pool)
    # pyarrow takes a quarter of a second to import: only for those who have such files.
    from services.buffer.prompts.parquet import ParquetBlocks, ParquetRows, read_parquet_block

    if rows.source.streaming:
        return StreamedFile(ParquetBlocks(rows), read_parquet_block, rows, pool)
    return IndexedFile(ParquetRows(rows), rows, pool)


class Locks:
    """`async with locks[name]`: callers keep names of streams that do not exist apart, too, without leaving a trace."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, name: str) -> asyncio.Lock:
        return self._held.setdefault(name, asyncio.Lock())

    def __len__(self) -> int:
        return len(self._held)


# Prompt sources of the streams: opened once, read under a lock for each stream, so that cursors move in order.
# A source that cannot be opened or read puts its stream in trouble: calls that need prompts say why, everything else
# goes on, and a call for prompts a second later or more has it opened again. A file that is put back ends the trouble.

_OPENERS = 4
_READERS = 4
_TRY_AGAIN_SECONDS = 1.0
_READ_SECONDS = 150.0


class PromptSources:
    """Opens and reads the sources of each stream. Readers hold the stream's lock until the cursor has moved."""

    def __init__(self, user_code: UserCode, files: PromptFiles) -> None:
        self.locks = Locks()
        self.files = files
        self._user_code = user_code
        self._mixes: dict[str, PromptMix] = {}
        self._data_sources: dict[str, DataSourceReader] = {}
        self._opening: dict[str, asyncio.Task[PromptMix]] = {}
        self._reading: dict[str, asyncio.Task[MixReading]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._troubles: dict[str, str] = {}
        self._tried: dict[str, float] = {}
        # A file that never answers keeps its thread: opening others must not keep those that are open from being read.
        self._openers = BlockingPool("prompt-opener", _OPENERS)
        self._readers = BlockingPool("prompt-reader", _READERS)

    async def path_of_client(self, path: str) -> str:
        """Returns the file that a client names. Raises InvalidArgument when clients may not name it."""
        return await self._openers.run(self.files.of_client, path)

    async def begin(self, config: StreamConfig) -> StreamState:
        """Returns a new stream's state, its sources at their start. Raises InvalidArgument for an unreadable source."""
        state = StreamState(config)
        if not config.has_source:
            return state
        mix = self._mixes[config.name] = await self._open(config)
        return replace(state, bad_lines=mix.bad_lines, file_digests=mix.digests, cursors=mix.start())

    def resume(self, state: StreamState) -> asyncio.Task[PromptMix] | None:
        """Starts to open a stream's sources after a restart; returns None when it has none."""
        if not state.config.has_source:
            return None
        self._tried[state.name] = time.monotonic()
        self._troubles[state.name] = "its prompt files are being opened"
        task = self._opening[state.name] = asyncio.create_task(self._reopen(state))
        task.add_done_callback(lambda task: self._opened(state, task))
        return task

    def trouble_of(self, stream: str) -> str | None:
        """Returns why a stream's prompts cannot be read now; None when they can."""
        return self._troubles.get(stream)

    def require(self, state: StreamState) -> None:
        """Raises FailedPrecondition while a stream's prompts cannot be read; now and then it opens them again."""
        if state.name not in self._troubles:
            return
        is_due = time.monotonic() - self._tried[state.name] >= _TRY_AGAIN_SECONDS
        if is_due and state.name not in self._opening:
            self.resume(state)
        raise FailedPrecondition(
            f"stream {state.name} is in trouble, its prompts cannot be read: {self._troubles[state.name]}",
            reason="STREAM_IN_TROUBLE",
        )

    async def read(self, state: StreamState, counts: Sequence[int]) -> MixReading:
        """Reads the next prompts, `counts` of each source. Raises FailedPrecondition when the stream is in trouble."""
        if state.name in self._opening:
            await asyncio.wait({self._opening[state.name]}, timeout=_TRY_AGAIN_SECONDS)
        self.require(state)
        mix = self._mixes[state.name]
        try:
            # A data source has a time limit of its own.
            async with asyncio.timeout(None if state.config.data_source else _READ_SECONDS):
                return await self._read_alone(state, mix, counts)
        except (InvalidArgument, OSError, TimeoutError) as error:
            if isinstance(error, InvalidArgument) and error.reason == "BAD_LINE":
                raise FailedPrecondition(error.message, reason=error.reason, **error.metadata) from error
            await self._close(state.name)
            self._begin_trouble(state, str(error) or f"its prompt files did not answer within {_READ_SECONDS:g} s")
            self.require(state)
            raise

    async def _read_alone(self, state: StreamState, mix: PromptMix, counts: Sequence[int]) -> MixReading:
        """Waits for the read of a cancelled call, which goes on in its thread, so that reads do not pile up."""
        if state.name in self._reading:
            await asyncio.wait({self._reading[state.name]})
        task = self._reading[state.name] = asyncio.create_task(mix.read(state.cursors, counts))
        return await asyncio.shield(task)

    def takes_samples(self, stream: str) -> bool:
        """True when the stream's data source wants to see what was generated."""
        reader = self._data_sources.get(stream)
        return reader is not None and reader.takes_samples

    def chooses(self, stream: str) -> bool:
        """True when the stream's data source may choose of it what is trained once more."""
        reader = self._data_sources.get(stream)
        return reader is not None and reader.chooses

    async def hand_over(self, state: StreamState, groups: Sequence[Generated], kept: KeptGroups) -> None:
        async with self.locks[state.name]:
            if reader := self._data_sources.get(state.name):
                await reader.hand_over(state.cursors[0], groups, kept)

    async def choose(self, state: StreamState, asked: ReuseRequest, kept: KeptGroups) -> Sequence[PromptEntry]:
        """The finished groups that the data source chooses. Raises FailedPrecondition. The lock is held."""
        self.require(state)
        if (reader := self._data_sources.get(state.name)) is None:
            return ()
        return await reader.choose(state.cursors[0], asked, kept)

    async def close_stream(self, stream: str) -> None:
        await self._close(stream)
        self._opening.pop(stream, None)
        self._troubles.pop(stream, None)

    async def close(self) -> None:
        for stream in list(self._mixes):
            await self._close(stream)
        for task in (*self._opening.values(), *self._reading.values()):
            task.cancel()

    async def _close(self, stream: str) -> None:
        self._data_sources.pop(stream, None)
        if stream in self._mixes:
            await self._mixes.pop(stream).close()

    async def _reopen(self, state: StreamState) -> PromptMix:
        for file in state.config.files:
            await self._openers.run(self.files.check, file.path)
        mix = await self._open(state.config)
        pairs = zip(state.config.files, state.cursors, state.file_digests, mix.digests, strict=False)
        for file, cursor, known, digest in pairs:
            if digest != known:
                await mix.close()
                raise FailedPrecondition(
                    f"prompt file {file.path} has changed since stream {state.name} began to read it, so its position "
                    f"(epoch {cursor.epoch}, row {cursor.row}) is no longer valid: put the old file back, or start "
                    "with another --data-dir",
                    reason="PROMPT_FILE_CHANGED",
                )
        return mix

    def _opened(self, state: StreamState, task: asyncio.Task[PromptMix]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if self._opening.get(state.name) is not task:  # its stream was deleted meanwhile
            if error is None:
                self._closing.add(closing := asyncio.create_task(task.result().close()))
                closing.add_done_callback(self._closing.discard)
            return
        del self._opening[state.name]
        if error is None:
            self._mixes[state.name] = task.result()
            del self._troubles[state.name]
            log.info("stream_opened", stream=state.name)
        else:
            self._begin_trouble(state, error.message if isinstance(error, HeadraceError) else str(error))

    def _begin_trouble(self, state: StreamState, why: str) -> None:
        self._tried[state.name] = time.monotonic()
        if self._troubles.get(state.name) != why:
            log.error("stream_in_trouble", stream=state.name, why=why)
        self._troubles[state.name] = why

    async def _open(self, config: StreamConfig) -> PromptMix:
        reader = None
        if config.data_source:
            reader = self._data_sources[config.name] = await self._user_code.data_source(config.data_source)
        return await self._openers.run(open_prompts, config, reader, self._readers)


_REUSED_FROM = "reused_from"


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The samples of one group, as its data source gave them."""

    samples: tuple[sample_pb2.Sample, ...]
    needs_reward: bool

    @classmethod
    def parse(cls, packed: Sequence[bytes], n_samples: int, prompt_id: str, *, needs_reward: bool) -> FinishedGroup:
        """Raises InvalidArgument for a group of fewer than `n_samples`."""
        if len(packed) < n_samples:
            raise InvalidArgument(
                f"the data source brought {len(packed)} finished samples for {prompt_id}, n_samples_per_prompt is "
                f"{n_samples}: return them as one list, or with one group_index"
            )
        return cls(tuple(sample_pb2.Sample.FromString(data) for data in packed), needs_reward)

    def named(self, group_id: str, lease_id: str) -> tuple[NewSample, ...]:
        """Returns the samples as a producer would put them. Raises InvalidArgument for what cannot be put."""
        rollouts: dict[str, str] = {}
        new: list[NewSample] = []
        for place, sample in enumerate(self.samples):
            envelope = sample_pb2.SampleEnvelope()
            envelope.CopyFrom(sample.envelope)
            if envelope.tags or envelope.sample_id:
                envelope.tags[_REUSED_FROM] = envelope.sample_id
            envelope.sample_id, envelope.group_id = f"{group_id}/again/{place}", group_id
            envelope.rollout_id = rollouts.setdefault(sample.envelope.rollout_id, envelope.sample_id)
            raw = RawSample(envelope.SerializeToString(deterministic=True), sample.payload)
            key = payload_key(lease_id, place)
            new.append(to_finished(raw, group_id, key, needs_reward=self.needs_reward))
        return distinct(new)


# Prompts come into the ledger when producers ask for work, and with them groups that a data source brings finished.
# A data source that wants to see what was generated is given every group once its put is durable. What it chooses of
# that to be trained once more takes the places that producers would have had, and is told apart by its prompts' ids.

CheckSamples = Callable[[Sequence[tuple[str, NewSample]]], Awaitable[None]]
"""Raises InvalidArgument for samples, each with its group's id, that could not be trained."""

_FULL = (NoLeaseReason.ADMISSION, NoLeaseReason.LIMITER, NoLeaseReason.BYTES)


class PromptReading:
    """Reads under the stream's lock. Unblocked by: a lease's request."""

    def __init__(self, committer: Committer, sources: PromptSources, store: Store, check: CheckSamples) -> None:
        self._committer = committer
        self._ledger = committer.ledger
        self._sources = sources
        self._store = store
        self._check = check
        self._payloads = BlockingPool("generated-samples", 1)

    async def read(self, stream: str, max_groups: int) -> None:
        """Reads until no prompt is wanted: while a file is read, other calls may change which source comes next."""
        async with self._sources.locks[stream]:
            if self._sources.chooses(stream) and any(counts := self._wanted(stream, max_groups)):
                await self._choose(stream, sum(counts))
            while any(counts := self._wanted(stream, max_groups)):
                reading = await self._sources.read(self._ledger.stream(stream).state, counts)
                finished = await self._finished(stream, reading.finished)
                prompts, cursors, ended = reading.prompts, reading.cursors, reading.ended
                self._committer.start(Ledger.read, stream, prompts, cursors, ended, finished)

    def _wanted(self, stream: str, max_groups: int) -> Sequence[int]:
        """A group that may be chosen again is trained a step late: producers begin that much less ahead."""
        return self._ledger.stream(stream).prompts_wanted(max_groups, is_held_back=self._sources.chooses(stream))

    async def generated(self, transaction: Transaction) -> None:
        """Gives the groups that a durable transaction made READY to the data sources of their streams."""
        ready: defaultdict[str, list[Group]] = defaultdict(list)
        for event in transaction.events:
            if event.kind == "put" and event.group_id and self._sources.takes_samples(event.stream):
                group = transaction.groups[event.group_id]
                if group.state is GroupState.READY and not is_again(group.prompt):
                    ready[event.stream].append(group)
        for stream, groups in ready.items():
            packed = [each async for each in self._packed(groups)]
            known = self._ledger.streams.get(stream)
            if known and groups[0].group_id in known.groups:  # else its stream was deleted since
                await self._sources.hand_over(self._ledger.stream(stream).state, packed, partial(self._kept, stream))

    async def _choose(self, stream: str, count: int) -> None:
        if self._ledger.no_lease_reason(stream) in _FULL:
            return
        step, oldest = self._ledger.stream(stream).next_filled()
        state = self._ledger.stream(stream).state
        asked = ReuseRequest(step, oldest, count, state.config.n_samples_per_prompt, self._of_step(stream, step))
        steps = await self._sources.choose(state, asked, partial(self._kept, stream))
        known = self._ledger.stream(stream).prompts
        new = [each for each in steps if each.prompt.prompt_id not in known]
        if not new:
            return
        finished = await self._finished(stream, finished_of(new))
        ended = state.ended or (state.exhausted,)
        self._committer.start(Ledger.read, stream, [[each.prompt for each in new]], state.cursors, ended, finished)
        log.info("groups_trained_again", stream=stream, groups=len(new), step=step)

    async def _finished(self, stream: str, packed: Mapping[str, Sequence[bytes]]) -> dict[str, Finish]:
        """Raises FailedPrecondition for samples that could not be trained."""
        config = self._ledger.stream(stream).state.config
        finished: dict[str, Finish] = {}
        try:
            async for prompt_id, samples in paced(list(packed.items())):
                group = FinishedGroup.parse(
                    samples, config.n_samples_per_prompt, prompt_id, needs_reward=config.needs_reward
                )
                trial = f"{stream}/0"
                await self._check([(trial, sample) for sample in group.named(trial, f"{trial}#1")])
                finished[prompt_id] = group.named
        except InvalidArgument as error:
            raise FailedPrecondition(
                f"the data source brought samples that cannot be trained: {error.message}", reason="DATA_SOURCE_FAILED"
            ) from error
        return finished

    def _of_step(self, stream: str, step: int) -> list[str]:
        """READY groups whose turn is not before the step: chosen for it, they could be twice in one batch."""
        indexed = self._ledger.stream(stream)
        states = (GroupState.READY, GroupState.LEASED)
        waiting = sorted(indexed.change_order.before(self._ledger.position + 1, states), key=lambda g: g.admitted_at)
        before = (step - indexed.state.step) * indexed.state.config.groups_per_step
        return [group.group_id for group in waiting[before:]]

    async def _kept(self, stream: str) -> list[Generated]:
        """The generated groups that still have their samples, and were not chosen since."""
        indexed = self._ledger.stream(stream)
        chosen = {origin_group(prompt_id) for prompt_id in indexed.prompts}
        groups = [
            group
            for group in indexed.groups.values()
            if group.state in (GroupState.READY, GroupState.CONSUMED)
            and not is_again(group.prompt)
            and group.group_id not in chosen
        ]
        return [each async for each in self._packed(groups)]

    async def _packed(self, groups: Sequence[Group]) -> AsyncIterator[Generated]:
        async for group in paced(groups):
            if any(record.column_bytes for record in group.samples):
                log.warning("group_not_handed_over", group_id=group.group_id, why="it has columns that are out of line")
                continue
            payloads = await self._payloads.run(self._store.read_payloads, group.samples)
            pairs = zip(group.samples, payloads, strict=True)
            packed = [wire.sample_to_proto(record, payload).SerializeToString() for record, payload in pairs]
            yield Generated(group.group_id, group.prompt.body, packed)
