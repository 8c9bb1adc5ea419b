"""Commands between ranks, in a store that asks nobody who they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from services.trainer.control.channel import Control
from services.trainer.control.commands import DropGroups, encode
from tests.support.processes.listening import listening, open_to_others


@pytest.fixture
def control() -> Iterator[tuple[Control, int]]:
    """Rank 0's, and the port where its store listens."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = listening([os.getpid()])
    made = Control(0, torch.device("cpu"))
    (address,) = listening([os.getpid()]).keys() - before.keys()
    assert open_to_others([address]) == []
    yield made, int(address.rpartition(":")[2])
    dist.destroy_process_group()


def test_a_fact_is_there_once_it_is_put(control: tuple[Control, int]) -> None:
    mine, _ = control
    assert not mine.has("fact")
    with pytest.raises(KeyError):
        mine.get("fact")
    mine.put("fact", "true ✓")
    assert (mine.has("fact"), mine.get("fact"), mine.wait_for("fact")) == (True, "true ✓", "true ✓")


def test_what_a_stranger_puts_into_the_store_is_as_if_it_were_not_there(control: tuple[Control, int]) -> None:
    mine, port = control
    mine.put("fact", "true")
    mine.put("other", "different")
    stranger = dist.TCPStore("127.0.0.1", port, is_master=False)
    stranger.set("command/0", encode(DropGroups()).decode())
    assert not mine.has("command/0")
    fact, other = sorted(key for key in stranger.list_keys() if key.endswith(("/fact", "/other")))
    for forged in (encode(DropGroups()).decode(), "", "0" * 64 + "false", stranger.get(other).decode()):
        stranger.set(fact, forged)
        assert not mine.has("fact")
    mine.put("fact", "true again")
    assert mine.get("fact") == "true again"


def test_bytes_that_are_no_request_leave_the_store_as_it_was(control: tuple[Control, int]) -> None:
    mine, port = control
    for words in (b"", b"abcd", b"\x16\x03\x01" + os.urandom(300), os.urandom(10_000)):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
    mine.put("fact", "true")
    assert mine.get("fact") == "true"
