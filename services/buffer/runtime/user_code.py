"""The job's Python in the buffer: the functions that it names and their arguments. None of it comes over the wire."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError, FailedPrecondition
from headrace.hooks import HookArgs
from headrace.hooks.buffer_filter import load_buffer_filter, run_packed_buffer_filter
from headrace.process.scratch import Scratch, delete_scratch
from headrace.process.workers import WorkerError, WorkerPool
from services.buffer.prompts.data_source import DataSourceReader

_LOAD_SECONDS = 120.0


class GroupChooser:
    """Its choice is durable before it is answered, so a restart does not ask again."""

    def __init__(self, path: str, args: HookArgs, ledger: Path, *, seconds: float) -> None:
        """`ledger` is its folder, which one process at a time owns."""
        self._path = path
        self._args = args
        self._ledger = ledger
        self._seconds = seconds
        self._pool = WorkerPool(1)

    async def start(self) -> None:
        """Loads the function, and deletes what a killed buffer left behind.

        Raises ConfigError when the function cannot be loaded or takes other arguments.
        """
        delete_scratch(self._ledger, "filter-*")
        try:
            await self._pool.run(
                load_buffer_filter, self._path, timeout_seconds=_LOAD_SECONDS, name=f"hook {self._path}"
            )
        except WorkerError as error:
            raise ConfigError(error.message, field="buffer.buffer_filter_path") from error

    async def close(self) -> None:
        await self._pool.close()

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yields a folder for the groups of one choice, and deletes it afterwards."""
        scratch = Scratch(self._ledger, f"filter-{secrets.token_hex(4)}")
        try:
            scratch.make()
            yield scratch.folder
        finally:
            scratch.delete()

    async def choose(self, step: int, groups: Path, num_groups: int) -> tuple[list[int], list[int]]:
        """Returns (chosen, dropped) as indices into the file that `pack_groups` has written.

        Raises FailedPrecondition when the function fails or takes too long.
        """
        work = (self._path, self._args, step, groups, num_groups)
        try:
            chosen, dropped = await self._pool.run(
                run_packed_buffer_filter, *work, timeout_seconds=self._seconds, name=f"hook {self._path}"
            )
        except WorkerError as error:
            raise FailedPrecondition(
                f"step {step} has no batch, its buffer filter failed: {error.message}", reason="BUFFER_FILTER_FAILED"
            ) from error
        return chosen, dropped


@dataclass(frozen=True, slots=True)
class UserCode:
    """A job that names no functions has the defaults."""

    args: HookArgs | None = None
    buffer_filter_path: str | None = None
    seconds: float = 60.0
    ledger: Path | None = None
    """Its folder, after which the temporary folders of choices are named."""

    async def chooser(self) -> GroupChooser | None:
        """Returns None without a buffer_filter. Raises ConfigError when the function cannot be loaded."""
        if self.buffer_filter_path is None or self.args is None or self.ledger is None:
            return None
        chooser = GroupChooser(self.buffer_filter_path, self.args, self.ledger, seconds=self.seconds)
        await chooser.start()
        return chooser

    async def data_source(self, path: str) -> DataSourceReader:
        """Raises ConfigError when the class cannot be loaded, or when this process was started without its job."""
        if self.args is None:
            raise ConfigError(
                f"the ledger's prompts come from {path}, but this process has no job: start it with its job"
            )
        reader = DataSourceReader(path, self.args, seconds=self.seconds)
        await reader.start()
        return reader
