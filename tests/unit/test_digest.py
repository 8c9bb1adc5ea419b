"""Digests name their hash; SHA-256 from other clients is taken with and without its name."""

from __future__ import annotations

import hashlib

import pytest

from headrace.digest import digest_of, matches


def test_a_digest_is_a_multihash_of_blake3() -> None:
    # The test vector of BLAKE3's own repository for no input.
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest_of(b"") == bytes.fromhex("1e20" + empty)


@pytest.mark.parametrize("name", [b"", b"\x12\x20"])
def test_sha_256_is_taken_as_well(name: bytes) -> None:
    digest = name + hashlib.sha256(b"payload").digest()
    assert matches(digest, b"payload")
    assert not matches(digest, b"another")


def test_nothing_matches_a_hash_that_is_not_known() -> None:
    assert matches(digest_of(b"payload"), b"payload")
    assert not matches(digest_of(b"payload"), b"another")
    assert not matches(b"\x99" + digest_of(b"payload")[1:], b"payload")
    assert not matches(b"\x99\x20" + hashlib.sha256(b"payload").digest(), b"payload")
    assert not matches(b"", b"")
