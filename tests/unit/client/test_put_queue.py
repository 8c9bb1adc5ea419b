"""Puts made at the same time share calls; each of them still has an answer, an error and a deadline of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.client.put_queue import PutQueue
from headrace.errors import DataLoss, DeadlineExceeded, NotFound
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import served_buffer

NUM_GROUPS = 40


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[BufferClient]:
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(f"127.0.0.1:{server.port}") as client:
        yield client


async def leased_puts(client: BufferClient) -> list[pb.GroupPut]:
    config = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=NUM_GROUPS)
    await client.create_stream(config)
    await client.submit_prompts("train", text_prompts(*(f"q{i}" for i in range(NUM_GROUPS))))
    return [complete_put(lease) for lease in (await client.lease_groups("train", "p", NUM_GROUPS)).leases]


class CountedCalls:
    """Passes calls on, once it is open."""

    def __init__(self, client: BufferClient) -> None:
        self._client = client
        self.opened = asyncio.Event()
        self.num_groups: list[int] = []

    async def __call__(self, request: bytes, seconds: float) -> pb.PutGroupsResponse:
        self.num_groups.append(len(pb.PutGroupsRequest.FromString(request).groups))
        await self.opened.wait()
        return await self._client._send_puts(request, seconds)


async def put_behind(calls: CountedCalls, puts: Sequence[pb.GroupPut]) -> list[asyncio.Task[Sequence[pb.PutResult]]]:
    """Each put by itself, once two calls are on the wire."""
    queue = PutQueue(calls)
    waiting = [asyncio.create_task(queue.put([put], 30)) for put in puts]
    while len(calls.num_groups) < 2:
        await asyncio.sleep(0)
    return waiting


async def test_puts_that_come_while_others_are_on_the_wire_share_a_call(client: BufferClient) -> None:
    puts = await leased_puts(client)
    calls = CountedCalls(client)
    waiting = await put_behind(calls, puts)
    calls.opened.set()
    results = [result for results in await asyncio.gather(*waiting) for result in results]
    assert [result.group_id for result in results] == [put.group_id for put in puts]
    assert {result.state for result in results} == {pb.GROUP_STATE_READY}
    assert calls.num_groups == [1, 1, NUM_GROUPS - 2]


async def test_a_mistake_is_told_to_the_caller_who_made_it(client: BufferClient) -> None:
    puts = await leased_puts(client)
    puts[5].samples[0].envelope.digest = bytes(32)
    puts[9].group_id = "train/99"
    for sample in puts[9].samples:
        sample.envelope.group_id = "train/99"
    answers = await asyncio.gather(*(client.put_groups([put]) for put in puts), return_exceptions=True)
    assert isinstance(answers[5], DataLoss)
    assert isinstance(answers[9], NotFound)
    right = [answer for i, answer in enumerate(answers) if i not in (5, 9)]
    assert all(not isinstance(a, BaseException) and a[0].state == pb.GROUP_STATE_READY for a in right)
    assert (await client.stats("train")).groups["READY"] == NUM_GROUPS - 2


async def test_a_short_deadline_is_nobody_elses(client: BufferClient) -> None:
    puts = await leased_puts(client)
    calls = CountedCalls(client)
    calls.opened.set()
    queue = PutQueue(calls)
    seconds = [30.0] * NUM_GROUPS
    seconds[7] = 0.0
    waiting = [queue.put([put], left) for put, left in zip(puts, seconds, strict=True)]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers[7], DeadlineExceeded)
    assert sum(isinstance(answer, list) for answer in answers) == NUM_GROUPS - 1
