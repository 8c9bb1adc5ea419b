"""What a service and its worker say to each other, over a socket pair.

A frame is the worker's secret, a length, and one MessagePack message. User code lives in the worker and can write to
the socket: bytes without the secret, beyond the bound, of another type or about a call that nobody made are `Corrupt`.
What the worker sends is never unpickled; only the service pickles, its own functions and arguments (`Start.work`).
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from headrace.wire.limits import MAX_HOOK_ANSWER_BYTES

SECRET_BYTES = 16

_HEADER = struct.Struct(f"<{SECRET_BYTES}sQ")


class Corrupt(Exception):
    """The bytes on the channel are not headrace's."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Run it. `work` is a pickled (function, args), apart so that its failure to load is this call's alone.

    What a call that `prepares` changes of its process and starts in it is to stay.
    """

    call_id: int
    work: bytes
    timeout_seconds: float
    prepares: bool


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for it any more."""

    call_id: int


class Returned(msgspec.Struct, tag=True, frozen=True):
    """It returned `result`, encoded by `headrace.process.workers.codec`."""

    call_id: int
    result: bytes


class Raised(msgspec.Struct, tag=True, frozen=True):
    """It raised; `is_ours` says that the message is written for people and stands by itself.

    `where` is the file and line of the user's code at which it happened; empty where none of it was on the way.
    """

    call_id: int
    kind: str
    detail: str
    traceback: str
    is_ours: bool
    where: str = ""


class LeftBehind(msgspec.Struct, tag=True, frozen=True):
    """It returned, and processes that it had started ran on; they were ended."""

    call_id: int
    processes: str


class Expired(msgspec.Struct, tag=True, frozen=True):
    """It was still waiting for something at its time limit and was cancelled."""

    call_id: int


Order = Start | Cancel
Reply = Returned | Raised | LeftBehind | Expired
Message = TypeVar("Message", Order, Reply)


@dataclass(frozen=True, slots=True)
class Reader(Generic[Message]):
    """Reads one side's messages."""

    stream: asyncio.StreamReader
    secret: bytes
    decoder: msgspec.msgpack.Decoder[Message]
    max_bytes: int | None = None

    async def next(self) -> Message:
        """Raises EOFError when the other side is gone, Corrupt for what it cannot have written."""
        try:
            secret, length = _HEADER.unpack(await self.stream.readexactly(_HEADER.size))
            if secret != self.secret or (self.max_bytes is not None and length > self.max_bytes):
                raise Corrupt("a frame without the worker's secret, or beyond the bound")
            return self.decoder.decode(await self.stream.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise Corrupt(str(error)) from error


def orders(stream: asyncio.StreamReader, secret: bytes) -> Reader[Order]:
    """What the service writes; its length is the service's own affair."""
    return Reader(stream, secret, msgspec.msgpack.Decoder(Order))


def replies(stream: asyncio.StreamReader, secret: bytes) -> Reader[Reply]:
    """What the worker writes."""
    return Reader(stream, secret, msgspec.msgpack.Decoder(Reply), MAX_HOOK_ANSWER_BYTES)


def encode(message: Order | Reply, secret: bytes) -> bytes:
    """The message as a frame."""
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(secret, len(body)) + body
