"""Callers that leave before they are read: their calls wait where many do so."""

from __future__ import annotations

import pytest

from headrace.rpc.peers import leavers
from headrace.rpc.peers.leavers import Leavers


def test_they_are_many_only_while_many_leave(monkeypatch: pytest.MonkeyPatch) -> None:
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
