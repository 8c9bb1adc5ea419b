"""The ledger's copy is read chunk by chunk while the ledger goes on.

The store makes the copy at one moment and pins it; its files are streamed, each followed by its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from services.buffer.blocking import BlockingPool
from services.buffer.store.base import Store
from services.buffer.store.copy import CopiedFile

_CHUNK_BYTES = 1 << 20


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


async def stream_copy(
    store: Store, columns: Callable[[], Sequence[CopiedFile]], readers: BlockingPool
) -> AsyncIterator[Chunk | Digest]:
    """Chunks of every file, each file's Digest behind them. Raises FailedPrecondition for a store without files.

    `columns` is asked once the store's copy is made: it has at least those that the copy names.
    """
    copy = store.copy()
    files = await readers.run(copy.__enter__)
    try:
        for file in (*files, *await readers.run(columns)):
            async for part in _stream_file(file, readers):
                yield part
    finally:
        await readers.run(copy.__exit__, None, None, None)


async def _stream_file(file: CopiedFile, readers: BlockingPool) -> AsyncIterator[Chunk | Digest]:
    digest = hashlib.sha256()
    with file.path.open("rb") as source:
        for offset in range(0, file.num_bytes, _CHUNK_BYTES):
            data = await readers.run(source.read, min(_CHUNK_BYTES, file.num_bytes - offset))
            await readers.run(digest.update, data)
            yield Chunk(file.name, offset, data)
    yield Digest(file.name, file.num_bytes, digest.digest())
