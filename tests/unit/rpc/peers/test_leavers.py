"""Callers that leave before they are read: their calls wait where many do so."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.rpc.peers import leavers
from headrace.rpc.peers.leavers import Leavers


async def test_a_call_waits_only_while_many_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(leavers, "time", type("Clock", (), {"monotonic": lambda: now}))
    monkeypatch.setattr(leavers, "_MANY", 3)
    some = Leavers()
    for _ in range(2):
        some.left()
    assert not some.are_many
    some.left()
    assert some.are_many
    now = 102.0
    assert not some.are_many, "they left long ago"


async def test_a_call_that_is_cancelled_while_it_waits_counts_as_one_that_left() -> None:
    some = Leavers()
    started = time.monotonic()
    await some.outlast()
    for _ in range(100):
        some.left()
    waiting = asyncio.create_task(some.outlast())
    await asyncio.sleep(0)
    before = list(some._times)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert list(some._times) != before
    assert time.monotonic() - started < 10
