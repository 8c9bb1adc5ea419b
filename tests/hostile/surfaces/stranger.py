"""Attacks one port, several hands at once, from a seed; slow connections stay open beside them until the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import ssl
from collections import Counter
from dataclasses import dataclass, field

from tests.hostile.surfaces.attack import Attack, Maker

_HANDS = 4
_ANSWER_SECONDS = 0.1
_DRIP_SECONDS = 0.2
_CONNECT_SECONDS = 10.0
_MOST_SLOW = 150
_MOST_READ = 1 << 16
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@dataclass
class Stranger:
    """`run` goes on where it was. `statuses` are those of HTTP, as they came; `requests` counts floods as many."""

    address: str
    path: str
    makes: Maker
    seed: str
    tls: ssl.SSLContext | None = None
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    _slow: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, count: int) -> None:
        """At least so many attacks more."""
        done = self.counts.total()
        end = done + count
        chances = [random.Random(f"{self.seed} {self.path} {done} {n}") for n in range(_HANDS)]
        await asyncio.gather(*(self._hand(chance, end) for chance in chances))

    async def close(self) -> None:
        """Ends what is slow."""
        for task in self._slow:
            task.cancel()
        await asyncio.gather(*self._slow, return_exceptions=True)

    async def _hand(self, chance: random.Random, end: int) -> None:
        while self.counts.total() < end:
            attack = self.makes(chance, self.path)
            is_slow = attack.name in ("silent", "idle") or bool(attack.drip)
            if is_slow and len(self._slow) >= _MOST_SLOW:
                continue
            self.requests += attack.requests
            self.counts[attack.name] += 1
            if is_slow:
                task = asyncio.create_task(self._played(attack))
                self._slow.add(task)
                task.add_done_callback(self._slow.discard)
                await asyncio.sleep(0)
            else:
                await self._played(attack)

    async def _played(self, attack: Attack) -> None:
        writer = None
        with contextlib.suppress(OSError, TimeoutError):  # the server ends the connection, as it may
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    host, _, port = self.address.rpartition(":")
                    reader, writer = await asyncio.open_connection(host, int(port), ssl=self.tls)
                writer.write(attack.data)
                if attack.name in ("silent", "idle") or attack.drip:
                    await self._drip(attack, reader, writer)
                elif attack.reads:
                    await self._read(reader)
                else:
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        await writer.drain()
            finally:
                if writer is not None:
                    writer.transport.abort()

    async def _drip(self, attack: Attack, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the server has enough of it."""
        reading = asyncio.create_task(self._read_all(reader))
        try:
            position = 0
            while not reading.done():
                if attack.drip:
                    writer.write(attack.drip[position : position + 1])
                    position = (position + 1) % len(attack.drip)
                await asyncio.wait({reading}, timeout=_DRIP_SECONDS)
        finally:
            reading.cancel()

    async def _read_all(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_MOST_READ):
                self._learn(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await self._read_all(reader)

    def _learn(self, data: bytes) -> None:
        self.statuses.update(status.decode() for status in _STATUS.findall(data))
