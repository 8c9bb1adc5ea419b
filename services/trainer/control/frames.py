"""Frames between rank 0 and another rank: four bytes of length and one message in MessagePack.

An empty frame is a heartbeat.
"""

from __future__ import annotations

import asyncio

import msgspec

HEARTBEAT = bytes(4)
MAX_FRAME_BYTES = 1 << 28
CHUNK_BYTES = 1 << 20


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rank 0 asks for a command. It may be large, so the rank that executes it decodes it, in the compute thread."""

    number: int
    command: msgspec.Raw


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An order's result on one rank."""

    number: int
    result: msgspec.Raw


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rank 0 gives a publication up; it overtakes orders."""

    publication_id: str


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The sender ends, and all is well."""


Message = Order | Done | Abort | Goodbye

_messages = msgspec.msgpack.Decoder(Message)


def frame(message: Message) -> bytes:
    """The message as bytes, with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(len(HEARTBEAT), "big") + body


async def next_message(reader: asyncio.StreamReader, silent_seconds: float) -> Message | None:
    """One message; None for a heartbeat.

    Raises TimeoutError when no byte comes within the seconds, ConnectionError or a MsgspecError for anything but a
    frame.
    """
    left = int.from_bytes(await _next(reader, len(HEARTBEAT), silent_seconds), "big")
    if left > MAX_FRAME_BYTES:
        raise ConnectionError(f"it announced a frame of {left} bytes, more than {MAX_FRAME_BYTES}")
    if not left:
        return None
    chunks = []
    while left:
        chunks.append(await _next(reader, min(left, CHUNK_BYTES), silent_seconds))
        left -= len(chunks[-1])
    message: Message = _messages.decode(b"".join(chunks))
    return message


async def _next(reader: asyncio.StreamReader, count: int, silent_seconds: float) -> bytes:
    async with asyncio.timeout(silent_seconds):
        return await reader.readexactly(count)
