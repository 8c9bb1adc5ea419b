"""A rank and rank 0 prove to each other that they belong to this run, without sending the run's secret.

Rank 0 sends a nonce; the rank answers with its number, a nonce of its own and a digest of all that; rank 0 answers with
another digest. Everything has a fixed size, so nobody can make the other side wait for, or keep, more than that.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets

_NONCE_BYTES = 32
_RANK_BYTES = 4
_DIGEST_BYTES = 32


class Refused(Exception):
    """The other side does not know the secret, or did not accept this one."""


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, missing: set[int]) -> int:
    """Called on rank 0: takes this rank out of `missing` and returns it. Raises Refused for anybody else."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(nonce)
    hello = await reader.readexactly(_RANK_BYTES + _NONCE_BYTES + _DIGEST_BYTES)
    said, digest = hello[:-_DIGEST_BYTES], hello[-_DIGEST_BYTES:]
    rank = int.from_bytes(said[:_RANK_BYTES], "big")
    if not hmac.compare_digest(digest, _digest(secret, b"hello", nonce, said)) or rank not in missing:
        raise Refused
    missing.remove(rank)
    writer.write(_digest(secret, b"welcome", nonce, said))
    return rank


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, rank: int) -> None:
    """Called on every other rank. Raises Refused when rank 0 hangs up, or is not of this run."""
    nonce = await reader.readexactly(_NONCE_BYTES)
    said = rank.to_bytes(_RANK_BYTES, "big") + secrets.token_bytes(_NONCE_BYTES)
    writer.write(said + _digest(secret, b"hello", nonce, said))
    try:
        welcome = await reader.readexactly(_DIGEST_BYTES)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Refused from error
    if not hmac.compare_digest(welcome, _digest(secret, b"welcome", nonce, said)):
        raise Refused


def _digest(secret: bytes, purpose: bytes, nonce: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, purpose + nonce + said, "sha256")
