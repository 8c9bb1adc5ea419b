"""A trainer or producer that is stopped (SIGSTOP) for longer than its right lasts, and wakes when another has it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import ROOT, served_buffer

LEASE_SECONDS = 4.0  # longer than a slow machine needs from the lease to the put


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with served_buffer(MemoryStore()) as (_, server):
        yield server.address


@pytest.fixture
async def client(address: str) -> AsyncIterator[BufferClient]:
    """Of a buffer with twelve prompts in two-group steps."""
    config = pb.StreamConfig(
        name="train", n_samples_per_prompt=1, groups_per_step=2, max_staleness=8, lease_seconds=LEASE_SECONDS
    )
    async with BufferClient(address) as client:
        await client.create_stream(config)
        await client.submit_prompts("train", text_prompts(*map(str, range(12))))
        yield client


@contextmanager
def stopping(role: str, address: str) -> Iterator[subprocess.Popen[str]]:
    """The process of that role; gone when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.stopping_process", role, address],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def until_stopped(process: subprocess.Popen[str]) -> None:
    """Waits for it to stop itself."""
    _, status = await asyncio.to_thread(os.waitpid, process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


async def wake(process: subprocess.Popen[str]) -> str:
    """Lets it go on to its end; what it said."""
    process.send_signal(signal.SIGCONT)
    said, _ = await asyncio.to_thread(process.communicate)
    return said


async def produced(client: BufferClient) -> None:
    leases = (await client.lease_groups("train", "p", 100)).leases
    await client.put_groups([complete_put(lease) for lease in leases])


async def test_an_old_trainer_that_wakes_after_a_new_one_is_fenced_and_told_why(
    client: BufferClient, address: str
) -> None:
    await produced(client)
    with stopping("trainer", address) as old:
        await until_stopped(old)
        epoch = (await client.rewind("train", 0)).epoch
        batches = []
        for step in range(3):
            reply = await client.lease_batch("train", epoch, step, timeout_seconds=60)
            batches.append([group.group_id for group in reply.groups])
            await client.consume("train", epoch, step, reply.digest)
        said = await wake(old)
    assert said.startswith("ABORTED FENCED epoch 1 of train is over: a newer trainer opened epoch 2; stop")
    assert old.returncode == 1
    stats = await client.stats("train")
    assert (stats.epoch, stats.step, stats.groups["CONSUMED"]) == (2, 3, 6)
    assert len({group_id for batch in batches for group_id in batch}) == 6


async def test_a_trainer_that_wakes_and_is_still_the_newest_goes_on(client: BufferClient, address: str) -> None:
    await produced(client)
    with stopping("trainer", address) as trainer:
        await until_stopped(trainer)
        assert await wake(trainer) == ""
    assert trainer.returncode == 0
    assert (await client.stats("train")).committed_step == 3


async def test_a_producer_that_wakes_after_its_lease_is_refused_and_told_why(
    client: BufferClient, address: str
) -> None:
    with stopping("producer", address) as producer:
        await until_stopped(producer)
        (leased,) = (await client.list_groups("train", [pb.GROUP_STATE_LEASED])).groups
        async for event in client.watch("train"):
            if event.kind == "lease_expired":
                break
        leases = (await client.lease_groups("train", "another", 100)).leases
        assert leased.group_id in {lease.group_id for lease in leases}
        said = await wake(producer)
    assert said.startswith("lost LEASE_LOST lease ")
    assert "another producer has its group now" in said
