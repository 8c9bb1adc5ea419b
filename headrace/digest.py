"""Digests that name their hash function: a multihash (code, length, digest). New ones are BLAKE3; SHA-256 is accepted.

At 147 KB a sample SHA-256 costs three times what BLAKE3 does. https://multiformats.io/multihash/
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from blake3 import blake3

_BLAKE3 = b"\x1e\x20"
_SHA256 = b"\x12\x20"
_SHA256_BYTES = 32


def digest_of(data: bytes | memoryview) -> bytes:
    """The BLAKE3 multihash, 34 bytes."""
    return _BLAKE3 + blake3(data).digest()


def batch_digest(group_digests: Iterable[bytes]) -> bytes:
    """Names a batch by the digests of its groups in training order; 32 bytes."""
    return hashlib.sha256(b"".join((b"headrace batch 2", *group_digests))).digest()


def batch_digest_of_0_1(groups: Iterable[tuple[str, Iterable[bytes]]]) -> bytes:
    """Computes the name that headrace 0.1.0 gives a batch: over (group id, digests of its payloads); 32 bytes."""
    digest = hashlib.sha256()
    for group_id, payload_digests in groups:
        digest.update(b"".join((group_id.encode(), *payload_digests)))
    return digest.digest()


def matches(digest: bytes, data: bytes | memoryview) -> bool:
    """True when `digest` belongs to the data.

    32 bytes without a code are a SHA-256; an unknown hash function never matches.
    """
    if len(digest) == _SHA256_BYTES:
        return hashlib.sha256(data).digest() == digest
    if digest.startswith(_BLAKE3):
        return blake3(data).digest() == digest[2:]
    return digest.startswith(_SHA256) and hashlib.sha256(data).digest() == digest[2:]
