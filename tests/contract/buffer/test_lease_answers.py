"""Leases that end between their grant and the answer: the answer leaves them out and has all others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from services.buffer.ledger.transaction import Transaction
from services.buffer.runtime.application import BufferApplication
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import completed_sample, text_prompts
from tests.support.processes.buffer_server import served_buffer


class HeldStore(MemoryStore):
    """Commits wait while the gate is closed, so that a second call comes before the first one is answered."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def commit(self, transactions: Sequence[Transaction]) -> None:
        assert self.gate.wait(60)
        super().commit(transactions)


@asynccontextmanager
async def held_buffer(num_prompts: int) -> AsyncIterator[tuple[BufferApplication, HeldStore, BufferClient]]:
    store = HeldStore()
    async with served_buffer(store) as (buffer, server), BufferClient(server.address) as client:
        await client.create_stream(pb.StreamConfig(name="s", n_samples_per_prompt=1, groups_per_step=4))
        await client.submit_prompts("s", text_prompts(*(f"{i}" for i in range(num_prompts))))
        try:
            yield buffer, store, client
        finally:
            store.gate.set()


async def until_events(buffer: BufferApplication, position: int) -> None:
    """Waits until memory has so many events, which the disk need not have."""
    async with asyncio.timeout(60):
        while buffer.ledger.position < position:
            await asyncio.sleep(0.001)


async def test_a_lease_call_loses_only_the_groups_that_are_dropped_meanwhile() -> None:
    num_groups, dropped = 7, [0, 2, 4]
    async with held_buffer(num_groups) as (buffer, store, client):
        position = buffer.ledger.position
        store.gate.clear()
        leasing = asyncio.create_task(client.lease_groups("s", "p", num_groups, request_id="r"))
        await until_events(buffer, position + num_groups)
        ids = [f"s/{i}" for i in dropped]
        dropping = asyncio.create_task(client.drop_groups("s", ids, "poison"))
        await until_events(buffer, position + num_groups + len(dropped))
        store.gate.set()
        assert (await dropping).num_groups == len(dropped)
        (answer,) = await asyncio.gather(leasing, return_exceptions=True)
        assert isinstance(answer, pb.LeaseGroupsResponse), answer
        got = [lease.group_id for lease in answer.leases]
        assert got == [f"s/{i}" for i in range(num_groups) if i not in dropped]
        renewed = await client.renew_leases([lease.lease_id for lease in answer.leases])
        assert not renewed.lost
        assert (await client.stats("s")).groups["LEASED"] == len(got)


async def test_a_group_whose_partial_samples_cannot_be_read_is_leased_without_them() -> None:
    unreadable = [1, 3]
    async with held_buffer(4) as (buffer, store, client):
        leases = (await client.lease_groups("s", "p", 4)).leases
        releases = []
        for lease in leases:
            partial = completed_sample(lease, 0, 0).pack()
            releases.append(pb.LeaseRelease(lease_id=lease.lease_id, partial_samples=[partial]))
        await client.release_leases(releases)
        for i in unreadable:
            (record,) = buffer.ledger.stream("s").groups[leases[i].group_id].partials
            store._payloads[record.key] = b"changed on the disk"
        (answer,) = await asyncio.gather(client.lease_groups("s", "p", 4), return_exceptions=True)
        assert isinstance(answer, pb.LeaseGroupsResponse), answer
        there = {lease.group_id: bool(lease.partial_samples) for lease in answer.leases}
        assert there == {lease.group_id: i not in unreadable for i, lease in enumerate(leases)}
