"""What a process and the worker it started say to each other, over a socket pair that nobody else can reach.

The one place with pickles: both ends are the same program of the same user on the same machine, and the bytes are
never stored. Everything that crosses a wire or reaches a disk goes through `headrace.trajectory` instead.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Start:
    """Run it. `work` is a pickled (function, args), apart so that its failure to load is this call's alone."""

    call_id: int
    work: bytes
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for it any more."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Returned:
    """It returned `result`, pickled."""

    call_id: int
    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """It raised; `is_ours` says that the message is written for people and stands by itself."""

    call_id: int
    kind: str
    detail: str
    traceback: str
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Expired:
    """It was still waiting for something at its time limit and was cancelled."""

    call_id: int


Reply = Returned | Raised | Expired


def encode(message: Start | Cancel | Reply) -> bytes:
    """The message with its length in front."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
