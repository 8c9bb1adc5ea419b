"""How rank 0's commands reach the other ranks: numbered keys in a key-value store that rank 0 keeps.

A store rather than a collective: a follower may wait for hours for the next batch, and a collective that waits for
hours cannot tell a slow batch from a dead peer. A follower asks the store again and again; when rank 0 is gone, the
store is gone, the asking raises, and the follower ends.

The store listens at one host and asks nobody who they are. So its keys cannot be guessed, and every value is signed
with the run's secret: what somebody else put there is as if it were not there.
"""

from __future__ import annotations

import datetime
import hmac
import secrets
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from headrace.rpc.log import log
from services.trainer.control import commands
from services.trainer.control.commands import Command, Leave
from services.trainer.megatron.rendezvous import listening_store, own_host

_ASK_AGAIN_SECONDS = 0.005
_SIGNATURE_CHARACTERS = 64
_CONNECT = datetime.timedelta(seconds=120)


class Control:
    """The ordered commands of one run. Built on every rank at once, after torch.distributed is up."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._next = 0
        if rank == 0:
            self.host, secret = own_host(), secrets.token_hex(32)
            store = listening_store(self.host, _CONNECT)
            _tell_all(f"{self.host} {store.port} {secret}", device)
        else:
            self.host, port, secret = _tell_all("", device).split()
            store = dist.TCPStore(self.host, int(port), is_master=False, timeout=_CONNECT)
        self.secret = bytes.fromhex(secret)
        self._store = dist.PrefixStore(_signature(self.secret, b"keys"), store)

    def send(self, command: Command) -> None:
        """From rank 0 to all others."""
        self.put(f"command/{self._next}", commands.encode(command).decode())
        self._next += 1

    def receive(self) -> Iterator[Command]:
        """All commands in order, until Leave."""
        while True:
            command = commands.decode(self.wait_for(f"command/{self._next}").encode())
            self._next += 1
            if isinstance(command, Leave):
                return
            yield command

    def wait_for(self, key: str) -> str:
        """A fact that will be there."""
        # Asked rather than waited for: the store's own wait logs a warning at every time-out.
        while (value := self._read(key)) is None:
            time.sleep(_ASK_AGAIN_SECONDS)
        return value

    def put(self, key: str, value: str) -> None:
        """A fact for the other ranks, e.g. where a sender listens."""
        self._store.set(key, _signature(self.secret, f"{key}={value}".encode()) + value)

    def get(self, key: str) -> str:
        """A fact that is there. Raises KeyError when it is not."""
        value = self._read(key)
        if value is None:
            raise KeyError(key)
        return value

    def has(self, key: str) -> bool:
        """True once the fact is there."""
        return self._read(key) is not None

    def _read(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        found: bytes = self._store.get(key)
        signature, value = found[:_SIGNATURE_CHARACTERS], found[_SIGNATURE_CHARACTERS:]
        if hmac.compare_digest(signature, _signature(self.secret, key.encode() + b"=" + value).encode()):
            return value.decode()
        log.warning("strangers_value", key=key)
        return None


def _signature(secret: bytes, message: bytes) -> str:
    return hmac.digest(secret, message, "sha256").hex()


def _tell_all(text: str, device: torch.device) -> str:
    """Rank 0's text, on every rank; up to 255 bytes."""
    data = torch.zeros(256, dtype=torch.uint8, device=device)
    encoded = text.encode()
    data[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).rstrip(b"\0").decode()
