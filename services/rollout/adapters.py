"""Adapters that requests name: engines load them when they are asked for, and drop those that nobody has used longest.

They are beside what a run publishes, and no versions of anything: a client that trains several models says with each
request which of them it wants.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path

from headrace.errors import DeadlineExceeded, FailedPrecondition
from services.rollout.engine.arguments import MOST_ADAPTERS
from services.rollout.engine.fleet import Engine, EngineState, Fleet
from services.rollout.publication.transports import below_root, unload_adapter


class NamedAdapters:
    """Engines hold MOST_ADAPTERS at most; a request for another one waits until one of them is unused."""

    def __init__(self, root: Path | None, fleet: Fleet) -> None:
        """Folders are below `root`; None: the job's engines serve no adapters."""
        self._root = root
        self._fleet = fleet
        self._held: dict[str, set[str]] = {}
        """The incarnations of engines that have each, the longest unused first."""
        self._users: Counter[str] = Counter()
        self._left = asyncio.Event()
        self._loading = asyncio.Lock()

    @asynccontextmanager
    async def using(self, folder: Path, *, seconds: float) -> AsyncIterator[str]:
        """The name by which all engines know the folder's adapter, until the block ends.

        Raises InvalidArgument for a folder that is not below the root, FailedPrecondition where it has no adapter or
        where the job's engines serve none, and DeadlineExceeded when no room came in time.
        """
        name = await asyncio.to_thread(self._name_of, folder)
        self._users[name] += 1  # before it is loaded: nobody drops it
        try:
            await self._load_within(name, folder, seconds)
            yield name
        finally:
            self._users[name] -= 1
            self._left.set()
            self._left = asyncio.Event()

    async def _load_within(self, name: str, folder: Path, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._load(name, folder, seconds)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"all {MOST_ADAPTERS} adapters of the engines were in use for {seconds:.0f} s: ask again later"
            ) from error

    async def _load(self, name: str, folder: Path, seconds: float) -> None:
        if not self._lacking(name):
            self._held[name] = self._held.pop(name)
            return
        async with self._loading:
            await self._make_room(name)
            for engine in self._lacking(name):
                await engine.client.load_adapter(name, str(folder), seconds=seconds)
                self._held.setdefault(name, set()).add(engine.incarnation)
            self._fleet.weights.name_adapter(name)

    def _lacking(self, name: str) -> list[Engine]:
        held = self._held.get(name, set())
        return [each for each in self._ready() if each.incarnation not in held]

    def _ready(self) -> list[Engine]:
        return [engine for engine in self._fleet.engines if engine.state is EngineState.READY]

    async def _make_room(self, name: str) -> None:
        while name not in self._held and len(self._held) >= MOST_ADAPTERS:
            unused = next((each for each in self._held if not self._users[each]), None)
            if unused is None:
                await self._left.wait()
                continue
            incarnations = self._held.pop(unused)
            await unload_adapter(unused, [each for each in self._ready() if each.incarnation in incarnations])

    def _name_of(self, folder: Path) -> str:
        file = below_root(self._root, folder) / "adapter_model.safetensors"
        try:
            status = file.stat()
            return f"named-{_digest(file, status.st_ino, status.st_size, status.st_mtime_ns)[:24]}"
        except OSError as error:
            raise FailedPrecondition(f"{folder} has no adapter: {error}") from error


@lru_cache(maxsize=256)
def _digest(file: Path, inode: int, size: int, modified_ns: int) -> str:
    """The SHA-256 of a file. The file is read once, and again only when its time, size or inode has changed."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
