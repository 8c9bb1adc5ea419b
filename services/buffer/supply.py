"""Prompt sources of the streams: opened once, read under a lock for each stream, so that cursors move in order."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from headrace.errors import FailedPrecondition
from services.buffer.group import Prompt
from services.buffer.prompts.data_source import DataSourceWalk
from services.buffer.prompts.mix import MixReading, PromptMix
from services.buffer.prompts.open import open_prompts
from services.buffer.stream import StreamConfig, StreamState
from services.buffer.user_code import UserCode


class PromptSupply:
    """By stream. `locks` are taken by whoever reads, until the cursor has moved."""

    def __init__(self, user_code: UserCode) -> None:
        self.locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._user_code = user_code
        self._mixes: dict[str, PromptMix] = {}
        self._data_sources: dict[str, DataSourceWalk] = {}

    async def begin(self, config: StreamConfig) -> StreamState:
        """The state of a new stream, its sources at their start. Raises InvalidArgument for what cannot be read."""
        state = StreamState(config)
        if not config.has_source:
            return state
        mix = await self._open(config)
        return replace(state, bad_lines=mix.bad_lines, file_digests=mix.digests, cursors=mix.start())

    async def resume(self, state: StreamState) -> None:
        """After a restart. Raises FailedPrecondition when a file has changed meanwhile."""
        if not state.config.has_source:
            return
        mix = await self._open(state.config)
        pairs = zip(state.config.files, state.cursors, state.file_digests, mix.digests, strict=False)
        for file, cursor, known, digest in pairs:
            if digest != known:
                raise FailedPrecondition(
                    f"prompt file {file.path} has changed since stream {state.name} began to walk it, its position in "
                    f"it (epoch {cursor.epoch}, row {cursor.row}) means nothing now: put the old file back, or begin "
                    "with another --data-dir",
                    reason="PROMPT_FILE_CHANGED",
                )

    async def read(self, state: StreamState, counts: Sequence[int]) -> MixReading:
        """The next prompts of a stream, so many of each source."""
        return await self._mixes[state.name].read(state.cursors, counts)

    async def give_back(self, state: StreamState, prompts: Sequence[Prompt]) -> None:
        """Groups that were dropped by age; only a data source has a use for them."""
        walk = self._data_sources.get(state.name)
        if walk and prompts:
            async with self.locks[state.name]:
                await walk.give_back(state.cursors[0], prompts, state.config.n_samples_per_prompt)

    async def close(self) -> None:
        """Ends workers."""
        for mix in self._mixes.values():
            await mix.close()

    async def _open(self, config: StreamConfig) -> PromptMix:
        walk = None
        if config.data_source:
            walk = self._data_sources[config.name] = await self._user_code.data_source(config.data_source)
        mix = self._mixes[config.name] = await asyncio.to_thread(open_prompts, config, walk)
        return mix
