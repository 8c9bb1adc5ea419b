"""Selection HOOK: the user's buffer_filter sees the waiting groups, in a worker process, and chooses the batch."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import ConfigError, FailedPrecondition
from headrace.hooks import HookArgs
from headrace.hooks.buffer_filter import load_buffer_filter, run_packed_buffer_filter
from headrace.process.scratch import Scratch, delete_leftovers
from headrace.process.workers import WorkerError, WorkerPool

_LOAD_SECONDS = 120.0


class GroupChooser:
    """Its choice is durable before it is answered, so a restart does not ask again."""

    def __init__(self, path: str, args: HookArgs, links: Path, *, seconds: float) -> None:
        """`links` is the folder of the ledger, which one process at a time owns."""
        self._path = path
        self._args = args
        self._links = links
        self._seconds = seconds
        self._pool = WorkerPool(1)

    async def start(self) -> None:
        """Loads the function, and deletes what a killed buffer left behind.

        Raises ConfigError when the function cannot be loaded or takes other arguments.
        """
        delete_leftovers(self._links, "filter-*")
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
        scratch = Scratch(self._links, f"filter-{secrets.token_hex(4)}")
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
