"""How rank 0's commands reach the other ranks: numbered keys in a key-value store that rank 0 keeps.

A store rather than a collective: a follower may wait for hours for the next batch, and a collective that waits for
hours cannot tell a slow batch from a dead peer. A follower asks the store again and again; when rank 0 is gone, the
store is gone, the asking raises, and the follower ends.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from services.trainer import commands
from services.trainer.commands import Command, Leave
from services.trainer.rendezvous import own_host

_ASK_AGAIN_SECONDS = 0.005
_CONNECT = datetime.timedelta(seconds=120)


class Control:
    """The ordered commands of one run. Built on every rank at once, after torch.distributed is up."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._next = 0
        if rank == 0:
            self.host = own_host()
            self._store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False, timeout=_CONNECT)
            _tell_all(f"{self.host} {self._store.port}", device)
        else:
            self.host, port = _tell_all("", device).split()
            self._store = dist.TCPStore(self.host, int(port), is_master=False, timeout=_CONNECT)

    def send(self, command: Command) -> None:
        """From rank 0 to all others."""
        self._store.set(f"command/{self._next}", commands.encode(command).decode())
        self._next += 1

    def receive(self) -> Iterator[Command]:
        """All commands in order, until Leave."""
        while True:
            command = commands.decode(self._wait_for(f"command/{self._next}"))
            self._next += 1
            if isinstance(command, Leave):
                return
            yield command

    def _wait_for(self, key: str) -> bytes:
        # Asked rather than waited for: the store's own wait logs a warning at every time-out.
        while not self._store.check([key]):
            time.sleep(_ASK_AGAIN_SECONDS)
        value: bytes = self._store.get(key)
        return value

    def wait_for(self, key: str) -> str:
        """A fact that will be there soon."""
        return self._wait_for(key).decode()

    def put(self, key: str, value: str) -> None:
        """A fact for the other ranks, e.g. where a sender listens."""
        self._store.set(key, value)

    def get(self, key: str) -> str:
        """A fact that is there."""
        value: bytes = self._store.get(key)
        return value.decode()

    def has(self, key: str) -> bool:
        """True once the fact is there."""
        return bool(self._store.check([key]))


def _tell_all(text: str, device: torch.device) -> str:
    """Rank 0's text, on every rank; up to 255 bytes."""
    data = torch.zeros(256, dtype=torch.uint8, device=device)
    encoded = text.encode()
    data[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).rstrip(b"\0").decode()
