"""Connections whose other end has vanished: no FIN, no RST, nothing. Silence is noticed, in calls without an end, too.

The times of `headrace.rpc.net` are a second here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.rpc import net
from headrace.rpc.net import Address
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.processes.buffer_server import served_buffer

BOUND_SECONDS = 60.0
"""For a machine that is busy: on a calm one both are noticed within the two seconds."""


@dataclass
class Line:
    """Relays connections; `vanish` swallows all that the present ones say, and leaves them open."""

    target: Address
    address: str = ""
    _well: set[asyncio.Event] = field(default_factory=set)

    def vanish(self) -> None:
        for event in self._well:
            event.clear()
        self._well = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self.target.host, self.target.port)
        well = asyncio.Event()
        well.set()
        self._well.add(well)
        await asyncio.gather(_relay(reader, back, well), _relay(there, writer, well))


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, well: asyncio.Event) -> None:
    """When one end closes, the other one hears of it only over a line that is well."""
    while data := await reader.read(65_536):
        if well.is_set():
            writer.write(data)
    if well.is_set():
        writer.close()


@asynccontextmanager
async def line(target: str) -> AsyncIterator[Line]:
    found = Line(Address.parse(target))
    tasks: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(found.serve(reader, writer))
        tasks.add(task)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    found.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_watch_and_a_wait_for_leases_notice_a_peer_that_vanished_and_so_does_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(net, "ASK_SECONDS", 1.0)
    monkeypatch.setattr(net, "ANSWER_SECONDS", 1.0)
    async with (
        served_buffer(MemoryStore()) as (_, server),
        line(server.address) as far,
        BufferClient(server.address) as near,
        BufferClient(far.address) as client,
        asyncio.timeout(BOUND_SECONDS),
    ):
        await near.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=1, groups_per_step=1))
        seen = asyncio.Event()
        watching = asyncio.create_task(watched(client, seen))
        leasing = asyncio.create_task(client.lease_groups("train", "p", 1, wait_seconds=600))
        while server.calls_in_progress < 2:
            await asyncio.sleep(0.01)
        far.vanish()
        await near.submit_prompts("train", text_prompts("a"))
        (lease,) = (await leasing).leases  # it has come again by a new connection
        await seen.wait()  # and so has the watch, which has no deadline
        while server.calls_in_progress > 1:  # the server has let the two go that vanished
            await asyncio.sleep(0.01)
        watching.cancel()
    assert lease.group_id


async def watched(client: BufferClient, seen: asyncio.Event) -> None:
    async for _ in client.watch("train"):
        seen.set()
