"""Prompt sources of the streams: opened once, read under a lock for each stream, so that cursors move in order.

A source that cannot be opened or read puts its stream in trouble: calls that need prompts say why, everything else goes
on, and a call for prompts a second later or more has it opened again. A file that is put back ends the trouble.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec.structs import replace

from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.hooks.data_source.generated import Generated, WantedAgain
from headrace.rpc.log import log
from services.buffer.blocking import BlockingPool
from services.buffer.ledger.stream import StreamConfig, StreamState
from services.buffer.prompts.data_source import DataSourceReader, KeptGroups
from services.buffer.prompts.files import PromptFiles
from services.buffer.prompts.mix import MixReading, PromptMix
from services.buffer.prompts.open import open_prompts
from services.buffer.prompts.reader import PromptEntry
from services.buffer.runtime.locks import Locks
from services.buffer.runtime.user_code import UserCode

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
        """Gives generated groups to the data source."""
        async with self.locks[state.name]:
            if reader := self._data_sources.get(state.name):
                await reader.hand_over(state.cursors[0], groups, kept)

    async def choose(self, state: StreamState, asked: WantedAgain, kept: KeptGroups) -> Sequence[PromptEntry]:
        """The finished groups that the data source chooses. Raises FailedPrecondition. The lock is held."""
        self.require(state)
        if (reader := self._data_sources.get(state.name)) is None:
            return ()
        return await reader.choose(state.cursors[0], asked, kept)

    async def close_stream(self, stream: str) -> None:
        """Closes the sources of a deleted stream."""
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
