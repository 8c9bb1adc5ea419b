"""What a stranger sends: each attack is bytes to send at once, or a few bytes and then one now and then.

`requests` is how many requests are in it, or frames of a flood.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

FLOOD = 100
CLIENT_HELLO = bytes.fromhex("16030100a5010000a10303") + bytes(32)


@dataclass(frozen=True, slots=True)
class Attack:
    """`drip` is sent a byte at a time afterwards, without an end; `reads` is False for who never reads the answers."""

    name: str
    data: bytes
    requests: int = 1
    drip: bytes = b""
    reads: bool = True


Maker = Callable[[random.Random, str], Attack]


def silent(chance: random.Random, path: str) -> Attack:
    return Attack("silent", b"", drip=b"")
