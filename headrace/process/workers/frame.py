"""The messages between a service and its worker, over a socket pair.

A frame is the worker's secret, a length, and one MessagePack message. User code lives in the worker and can write to
the socket: bytes without the secret, beyond the bound, of another type or about an unknown call are `Corrupt`.
What the worker sends is never unpickled; only the service pickles, its own functions and arguments (`Start.work`).
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from headrace.limits import MAX_HOOK_ANSWER_BYTES

SECRET_BYTES = 16

_HEADER = struct.Struct(f"<{SECRET_BYTES}sQ")


class Corrupt(Exception):
    """The bytes on the channel are not headrace's."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Run a call. `work` is a pickled (function, args), separate so that a failure to load it is this call's alone.

    Changes to the process, and processes started, by a call that `prepares` are kept.
    """

    call_id: int
    work: bytes
    timeout_seconds: float
    prepares: bool


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """No caller waits for the call any more."""

    call_id: int


class Returned(msgspec.Struct, tag=True, frozen=True):
    """The call returned `result`, encoded by `headrace.process.workers.codec`."""

    call_id: int
    result: bytes


class Raised(msgspec.Struct, tag=True, frozen=True):
    """The call raised; `is_ours` says that the message is written for people and needs no class name.

    `where` is the file and line of the user's code at which it happened; empty when no user code was on the stack.
    """

    call_id: int
    kind: str
    detail: str
    traceback: str
    is_ours: bool
    where: str = ""


class LeftBehind(msgspec.Struct, tag=True, frozen=True):
    """The call returned and left processes running that it had started; they were ended."""

    call_id: int
    processes: str


class Expired(msgspec.Struct, tag=True, frozen=True):
    """The call still waited at its time limit and was cancelled."""

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
        """Raises EOFError when the other side is gone, Corrupt for bytes that it cannot have written."""
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
    """Reads messages of the service, which have no limit of length."""
    return Reader(stream, secret, msgspec.msgpack.Decoder(Order))


def replies(stream: asyncio.StreamReader, secret: bytes) -> Reader[Reply]:
    """Reads messages of the worker, up to MAX_HOOK_ANSWER_BYTES."""
    return Reader(stream, secret, msgspec.msgpack.Decoder(Reply), MAX_HOOK_ANSWER_BYTES)


def encode(message: Order | Reply, secret: bytes) -> bytes:
    """The message as a frame."""
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(secret, len(body)) + body
