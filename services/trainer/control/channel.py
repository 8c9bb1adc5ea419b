"""The one connection between rank 0 and each other rank: orders out, answers back, heartbeats both ways.

What tells every rank within seconds that another one is gone, wherever it is and whatever it is doing: a connection
that closes is a rank that died; one that is silent for SILENT_SECONDS is a rank that hangs or a machine that is cut
off. Rank 0 then ends, which closes the other connections, so all ranks end. Collectives could wait for their own,
longer, timeout instead.

Between machines it is encrypted where the job has certificates: then both sides show one, too.

Only a rank that is still missing and knows the run's secret is listened to; all others are hung up on and change
nothing. Once every rank is there nobody can connect any more. A rank says its number and the secret, and rank 0
welcomes it.

On the wire a message is four bytes of length and MessagePack; an empty one is a heartbeat.

Lives on the rank's event loop: computation has a thread of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from headrace.errors import DeadlineExceeded, Unavailable
from headrace.rpc.log import log
from headrace.rpc.tls import SERVICE_NAME, TlsFolder, connecting_context, listening_context

BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0
_CONNECT_SECONDS = 60.0
_HANDSHAKE_SECONDS = 10.0
_REMEMBERED = 64
_HEARTBEAT = bytes(4)
_MAX_FRAME_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 20
_RANK_BYTES = 4
_WELCOME = b"\1"

R = TypeVar("R")


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rank 0 asks for a method of the worker. The rank that executes it decodes it, in the compute thread."""

    number: int
    method: str
    arguments: msgspec.Raw
    wants_answer: bool


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    result: msgspec.Raw


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rank 0 gives a publication up; it overtakes orders."""

    publication_id: str


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The sender ends, and all is well."""


Message = Order | Answer | Abort | Goodbye

_messages = msgspec.msgpack.Decoder(Message)


class PeerLost(Unavailable):
    """A rank of this trainer is gone; what this rank computes cannot be finished."""


class Channel:
    """States: open → (a peer is gone) lost, or → closed. After `close` nobody's end is a loss."""

    def __init__(self, rank: int, world_size: int, secret: bytes, tls: TlsFolder | None = None) -> None:
        """`tls`: connections are encrypted, and both sides show a certificate of it."""
        self._rank = rank
        self._tls = tls
        self._secret = secret
        self._loop = asyncio.get_running_loop()
        self._missing = set(range(1, world_size)) if rank == 0 else set()
        self._complete: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers: dict[int, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self._closed = False
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._expected: dict[tuple[int, int], Callable[[msgspec.Raw], None]] = {}
        self._aborted: deque[str] = deque(maxlen=_REMEMBERED)

    async def listen(self, listener: socket.socket) -> int:
        """Called on rank 0; returns the port that the others connect to."""
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {"ssl": listening_context(self._tls), "ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_CHUNK_BYTES, **secured)
        port: int = listener.getsockname()[1]
        return port

    async def until_complete(self) -> None:
        """Called on rank 0; returns once every rank is connected. Raises DeadlineExceeded when one never is."""
        if self._missing:
            both = {self._complete, self._lost}
            await asyncio.wait(both, timeout=_CONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            self._lost.result()
        if self._missing:
            raise DeadlineExceeded(
                f"ranks {sorted(self._missing)} did not connect to rank 0 within {_CONNECT_SECONDS:g} s: see their logs"
            )

    async def connect(self, host: str, port: int) -> None:
        """Called on every other rank. Raises PeerLost when rank 0 is not there, or not of this run."""
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {"ssl": connecting_context(self._tls), "server_hostname": SERVICE_NAME}
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(host, port, limit=_CHUNK_BYTES, **secured)
                await introduce(reader, writer, self._secret, self._rank)
        except (TimeoutError, OSError, EOFError) as error:
            raise PeerLost(f"rank 0 is gone ({host}:{port}: {error!r}): this rank ends too") from error
        self._keep(reader, writer, peer=0)

    def send(self, message: Message) -> None:
        """Sends to rank 0, or from it to all others. Not for the loop's own thread: a message may be large."""
        self._loop.call_soon_threadsafe(self._write, frame(message))

    async def next_order(self) -> Order:
        return await self._orders.get()

    def expect(self, number: int, decode: Callable[[msgspec.Raw], R]) -> list[asyncio.Future[R]]:
        """The answers to an order that is not sent yet, one of every other rank, by rank; others are dropped."""

        def answer_of(peer: int) -> asyncio.Future[R]:
            answer: asyncio.Future[R] = self._loop.create_future()

            def take(result: msgspec.Raw) -> None:
                if not answer.done():
                    answer.set_result(decode(result))

            self._expected[peer, number] = take
            return answer

        return [answer_of(peer) for peer in sorted(self._peers)]

    def abort(self, publication_id: str) -> None:
        """Called on rank 0: tells all senders of this publication to stop."""
        self._aborted.append(publication_id)
        self._write(frame(Abort(publication_id)))

    def is_aborted(self, publication_id: str) -> bool:
        """True when rank 0 gave this publication up. It may be called on every rank and from any thread."""
        return publication_id in self._aborted

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
        self._closed = True
        self._write(frame(Goodbye()))
        for task in self._tasks:
            task.cancel()
        for writer in self._peers.values():
            writer.close()  # what was written is still sent
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                peer = await _admit(reader, self._secret, self._missing)
        except (TimeoutError, OSError, EOFError):
            log.warning("stranger_refused", peer=str(writer.get_extra_info("peername")))
            writer.close()
            return
        writer.write(_WELCOME)
        self._keep(reader, writer, peer)
        if not self._missing and self._server is not None:
            self._server.close()
            self._complete.set_result(None)

    def _write(self, data: bytes) -> None:
        for writer in self._peers.values():
            writer.write(data)

    def _keep(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: int) -> None:
        self._peers[peer] = writer
        for work in (self._beat(writer), self._watch(reader, peer)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # the watch says what happened
            while True:
                writer.write(_HEARTBEAT)
                await writer.drain()
                await asyncio.sleep(BEAT_SECONDS)

    async def _watch(self, reader: asyncio.StreamReader, peer: int) -> None:
        try:
            while True:
                message = await _next_message(reader)
                if isinstance(message, Goodbye):
                    return
                self._take(message, peer)
        except EOFError:
            self._lose(peer, "its connection closed")
        except TimeoutError:
            self._lose(peer, f"it was silent for {SILENT_SECONDS:g} s")
        except (OSError, msgspec.MsgspecError) as error:
            self._lose(peer, str(error))

    def _take(self, message: Message | None, peer: int) -> None:
        match message:
            case Order():
                self._orders.put_nowait(message)
            case Answer(number, result):
                if take := self._expected.pop((peer, number), None):
                    take(result)
            case Abort(publication_id):
                self._aborted.append(publication_id)

    def _lose(self, peer: int, why: str) -> None:
        if self._closed or self._lost.done():
            return
        log.error("rank_lost", rank=peer, why=why)
        self._lost.set_exception(PeerLost(f"rank {peer} is gone ({why}): this rank ends too"))
        self._lost.exception()  # retrieved here; `guard` raises it


def frame(message: Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(len(_HEARTBEAT), "big") + body


async def _next_message(reader: asyncio.StreamReader) -> Message | None:
    """None for a heartbeat.

    Raises TimeoutError when no byte comes for SILENT_SECONDS, ConnectionError or a MsgspecError for what is no message.
    """
    left = int.from_bytes(await _next(reader, len(_HEARTBEAT)), "big")
    if left > _MAX_FRAME_BYTES:
        raise ConnectionError(f"it announced a frame of {left} bytes, more than {_MAX_FRAME_BYTES}")
    if not left:
        return None
    chunks = []
    while left:
        chunks.append(await _next(reader, min(left, _CHUNK_BYTES)))
        left -= len(chunks[-1])
    message: Message = _messages.decode(b"".join(chunks))
    return message


async def _next(reader: asyncio.StreamReader, count: int) -> bytes:
    async with asyncio.timeout(SILENT_SECONDS):
        return await reader.readexactly(count)


async def _admit(reader: asyncio.StreamReader, secret: bytes, missing: set[int]) -> int:
    """Called on rank 0: takes this rank out of `missing` and returns it."""
    hello = await reader.readexactly(_RANK_BYTES + len(secret))
    rank = int.from_bytes(hello[:_RANK_BYTES], "big")
    if not hmac.compare_digest(hello[_RANK_BYTES:], secret) or rank not in missing:
        raise ConnectionRefusedError("it is no rank of this run that is missing")
    missing.remove(rank)
    return rank


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, rank: int) -> None:
    """Called on every other rank. Raises EOFError or OSError when rank 0 hangs up."""
    writer.write(rank.to_bytes(_RANK_BYTES, "big") + secret)
    await reader.readexactly(len(_WELCOME))
