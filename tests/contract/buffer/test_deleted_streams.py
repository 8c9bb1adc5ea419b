"""A deleted stream and the next one of its name share nothing: not groups, leases, samples, nor calls on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import HeadraceError
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore
from tests.support.faults.fault_proxy import Direction, Fault, fault_proxy
from tests.support.ledgers.buffer_samples import complete_put, failed_put, text_prompts
from tests.support.processes.buffer_server import served_buffer


def config(name: str, **fields: Any) -> pb.StreamConfig:
    return pb.StreamConfig(name=name, n_samples_per_prompt=2, groups_per_step=2, **fields)


def some_prompts(count: int, first: int = 0) -> list[Any]:
    return text_prompts(*(f"{i}" for i in range(first, first + count)))


async def group_ids(client: BufferClient, stream: str) -> list[str]:
    found: list[str] = []
    token = ""
    while True:
        page = await client.list_groups(stream, page_size=1_000, page_token=token)
        found += [group.group_id for group in page.groups]
        token = page.next_page_token
        if not token:
            return sorted(found)


@pytest.mark.parametrize(("name", "num_deleted"), [("train/0", 1_025)])
async def test_groups_of_a_deleted_stream_are_not_in_the_next_one_after_two_more_starts(
    tmp_path: Path, name: str, num_deleted: int
) -> None:
    kept: list[str] = []
    for start in range(3):
        async with (
            served_buffer(SqliteStore(tmp_path)) as (_, server),
            BufferClient(server.address) as client,
        ):
            if start == 0:
                await client.create_stream(config(name))
                await client.submit_prompts(name, some_prompts(num_deleted))
                assert await client.delete_stream(name, force=True)
                await client.create_stream(config(name))
                kept = sorted(await client.submit_prompts(name, some_prompts(3)))
            assert await group_ids(client, name) == kept
            leases = (await client.lease_groups(name, "p", 1_000, request_id=f"{start}")).leases
            assert {lease.group_id for lease in leases} <= set(kept)


@pytest.mark.parametrize("count", [2_500])
async def test_leases_of_a_deleted_stream_are_lost_in_the_next_one(count: int) -> None:
    async with served_buffer(MemoryStore()) as (buffer, server), BufferClient(server.address) as client:
        await client.create_stream(config("s", lease_seconds=600))
        await client.submit_prompts("s", some_prompts(count))
        leases = []
        while len(leases) < count:
            request_id = f"{len(leases)}"
            leases += (await client.lease_groups("s", "p", 1_000, request_id=request_id)).leases
        # Both at once: not a moment in which the deleted stream's groups could go.
        deleting = asyncio.create_task(buffer.delete_stream("s", force=True))
        creating = asyncio.create_task(client.create_stream(config("s", lease_seconds=600)))
        await asyncio.gather(deleting, creating)
        renewed = await client.renew_leases([lease.lease_id for lease in leases])
        assert not renewed.renewed, "leases of the deleted stream live on"
        await client.submit_prompts("s", some_prompts(2))
        again = (await client.lease_groups("s", "p", 8, request_id="0")).leases
        assert not {lease.lease_id for lease in again} & {lease.lease_id for lease in leases}
        assert len(again) == 2
        await client.release_leases([pb.LeaseRelease(lease_id=leases[0].lease_id)])
        results = await client.put_groups([complete_put(lease) for lease in leases[:20]])
        assert {result.refused.reason for result in results} == {"LEASE_LOST"}
        assert (await client.stats("s")).groups["LEASED"] == 2


@dataclass
class Late:
    """A stream, and a client that works on it through a network on which an answer gets lost."""

    client: BufferClient
    epoch: int = 0
    leases: list[pb.GroupLease] = field(default_factory=list)
    digest: bytes = b""

    async def prepare(self) -> None:
        """One group is FAILED, two are LEASED, two are in the batch of step 0, one is queued."""
        await self.client.create_stream(config("s", max_attempts=1))
        await self.client.submit_prompts("s", some_prompts(6))
        self.epoch = (await self.client.rewind("s", 0, request_id="first")).epoch
        self.leases = list((await self.client.lease_groups("s", "p", 5, request_id="before")).leases)
        await self.client.put_groups([failed_put(self.leases[0]), *map(complete_put, self.leases[1:3])])
        self.digest = (await self.client.try_lease_batch("s", self.epoch, 0)).digest


RETRIED: dict[str, Callable[[Late], Awaitable[Any]]] = {
    "DeleteStream": lambda late: late.client.delete_stream("s", force=True),
    "SubmitPrompts": lambda late: late.client.submit_prompts("s", some_prompts(2, first=90)),
    "LeaseGroups": lambda late: late.client.lease_groups("s", "p", 1, request_id="after"),
    "PutGroups": lambda late: late.client.put_groups([complete_put(late.leases[3])]),
    "ConsumeBatch": lambda late: late.client.consume("s", late.epoch, 0, late.digest),
    "Rewind": lambda late: late.client.rewind("s", 0, request_id="second"),
}


@pytest.mark.parametrize("method", RETRIED)
async def test_a_retried_call_of_a_deleted_stream_changes_nothing_in_the_next_one(method: str) -> None:
    """Its answer got lost; before it is repeated, the stream was deleted and another one has its name."""
    async with (
        served_buffer(MemoryStore()) as (_, server),
        BufferClient(server.address) as other,
        fault_proxy(server.address) as proxy,
        BufferClient(proxy.address) as client,
    ):
        late = Late(client)
        await late.prepare()
        proxy.arm(Fault.BLACK_HOLE, Direction.ANSWER)
        calling = asyncio.create_task(_outcome(RETRIED[method](late)))
        async with asyncio.timeout(60):
            while not proxy.times_met:
                await asyncio.sleep(0.005)
        await other.delete_stream("s", force=True)
        await other.create_stream(config("s", max_attempts=1))
        await other.submit_prompts("s", some_prompts(6))
        epoch = (await other.rewind("s", 0)).epoch
        leases = (await other.lease_groups("s", "q", 1)).leases
        await other.put_groups([failed_put(lease) for lease in leases])
        before = await _everything(other)
        proxy.heal()
        await calling
        assert await _everything(other) == before
        await other.commit("s", epoch, 0)  # its trainer was not fenced


async def _outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except HeadraceError as error:
        return error


async def _everything(client: BufferClient) -> Any:
    assert "s" in [stream.name for stream in await client.list_streams()], "the next stream was deleted"
    return (await client.stats("s")).SerializeToString(deterministic=True), await client.list_groups("s")
