"""What tells every rank within seconds that another one is gone, wherever it is and whatever it is doing.

Each rank holds a connection to rank 0 and both ends send a byte a second. A connection that closes is a rank that
died; one that is silent for SILENT_SECONDS is a rank that hangs or a machine that is cut off. Rank 0 then ends, which
closes the other connections, so all ranks end. Collectives could wait for their own, longer, timeout instead.

Rank 0 sends a challenge to whoever connects. Only a rank that is still missing, and that answers with the run's secret,
is listened to; all others are hung up on and change nothing. Once every rank is there nobody can connect any more.

Lives on the rank's event loop: computation has a thread of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable
from contextlib import suppress

from headrace.errors import Unavailable
from headrace.rpc.log import log

BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0
_CONNECT_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_MAX_STRANGERS = 64
_NONCE_BYTES = 32
_RANK_BYTES = 4
_DIGEST_BYTES = 32
_GOODBYE = b"."
_BEAT = b"+"


class PeerLost(Unavailable):
    """A rank of this trainer is gone; what this rank computes cannot be finished."""


class Lifeline:
    """States: open → (a peer is gone) lost, or → closed. After `close` nobody's end is a loss."""

    def __init__(self, rank: int, world_size: int, secret: bytes) -> None:
        self._rank = rank
        self._secret = secret
        self._missing = set(range(1, world_size))
        self._strangers = 0
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self._closed = False

    async def listen(self, host: str) -> int:
        """On rank 0; returns the port that the others connect to."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def connect(self, host: str, port: int) -> None:
        """On every other rank."""
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            nonce = await reader.readexactly(_NONCE_BYTES)
        rank = self._rank.to_bytes(_RANK_BYTES, "big")
        writer.write(rank + self._answer(nonce, rank))
        self._keep(reader, writer, peer=0)

    async def until_lost(self) -> None:
        """Raises PeerLost when a rank is gone; never returns."""
        await asyncio.shield(self._lost)

    async def guard(self, work: Awaitable[None]) -> None:
        """Does the work. Raises PeerLost as soon as a rank is gone, also in place of the error that this brought."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and task.exception() is not None and not self._lost.done():
            # A collective that breaks can be faster than the news of why.
            await asyncio.wait({self._lost}, timeout=2 * BEAT_SECONDS)
        if self._lost.done():
            task.cancel()
            self._lost.result()
        await task

    async def close(self) -> None:
        """Says goodbye to all."""
        self._closed = True
        for writer in self._writers:
            with suppress(OSError):
                writer.write(_GOODBYE)
                await writer.drain()
            writer.close()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= _MAX_STRANGERS:
            writer.close()
            return
        self._strangers += 1
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                peer = await self._known(reader, writer)
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            peer = None
        finally:
            self._strangers -= 1
        if peer is None or peer not in self._missing:
            log.warning("stranger_refused", peer=str(writer.get_extra_info("peername")))
            writer.close()
            return
        self._missing.remove(peer)
        self._keep(reader, writer, peer)
        if not self._missing and self._server is not None:
            self._server.close()

    async def _known(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """The rank that knows the secret; None for anybody else."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(nonce)
        answer = await reader.readexactly(_RANK_BYTES + _DIGEST_BYTES)
        rank, digest = answer[:_RANK_BYTES], answer[_RANK_BYTES:]
        return int.from_bytes(rank, "big") if hmac.compare_digest(digest, self._answer(nonce, rank)) else None

    def _answer(self, nonce: bytes, rank: bytes) -> bytes:
        return hmac.digest(self._secret, nonce + rank, "sha256")

    def _keep(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: int) -> None:
        self._writers.append(writer)
        for work in (self._beat(writer), self._watch(reader, peer)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # the watch says what happened
            while True:
                writer.write(_BEAT)
                await writer.drain()
                await asyncio.sleep(BEAT_SECONDS)

    async def _watch(self, reader: asyncio.StreamReader, peer: int) -> None:
        try:
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    received = await reader.read(64)
                if _GOODBYE in received:
                    return None
                if not received:
                    return self._lose(peer, "its connection closed")
        except TimeoutError:
            self._lose(peer, f"it was silent for {SILENT_SECONDS:g} s")
        except OSError as error:
            self._lose(peer, str(error))

    def _lose(self, peer: int, why: str) -> None:
        if self._closed or self._lost.done():
            return
        log.error("rank_lost", rank=peer, why=why)
        self._lost.set_exception(PeerLost(f"rank {peer} is gone ({why}): this rank ends too"))
        self._lost.exception()  # seen: whoever guards raises it
