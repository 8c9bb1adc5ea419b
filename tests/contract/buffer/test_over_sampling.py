"""Over-sampled groups, over the wire and over shards: who is told that what it generates cannot be trained any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.open import Buffer, open_buffer
from headrace.client.shards import merged_leases
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import served_buffer

NAMES = [f"q{i}" for i in range(24)]


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} buffers")
async def buffer(request: pytest.FixtureRequest) -> AsyncIterator[Buffer]:
    """On-policy, four groups a step and four more in production on each shard."""
    stream = pb.StreamConfig(
        name="train", n_samples_per_prompt=2, groups_per_step=4, max_staleness=0, over_sampling_groups=4
    )
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(served_buffer(MemoryStore())) for _ in range(request.param)]
        buffer = open_buffer(",".join(server.address for _, server in servers))
        await buffer.create_stream(stream)
        await buffer.submit_prompts("train", text_prompts(*NAMES))
        yield buffer
        await buffer.close()


async def leased(buffer: Buffer) -> list[pb.GroupLease]:
    """All that may be leased now."""
    leases: list[pb.GroupLease] = []
    while some := (await buffer.lease_groups("train", "p", len(NAMES))).leases:
        leases += some
    return leases


async def test_a_waiting_producer_hears_that_the_step_has_its_batch(buffer: Buffer) -> None:
    epoch = (await buffer.rewind("train", 0)).epoch
    leases = await leased(buffer)
    assert len(leases) >= 8
    await buffer.put_groups([complete_put(lease) for lease in leases[:-2]])
    waiting = asyncio.create_task(buffer.lease_groups("train", "p", 8, wait_seconds=600.0, oldest_version=0))
    batch = await buffer.try_lease_batch("train", epoch, 0, wait_seconds=5.0)
    assert batch.ready
    answer = await asyncio.wait_for(waiting, 60)
    assert (list(answer.leases), answer.oldest_version) == ([], 1)
    assert answer.no_lease_reason == pb.NO_LEASE_REASON_ADMISSION
    late = {lease.group_id for lease in leases[-2:]}
    await buffer.release_leases([pb.LeaseRelease(lease_id=lease.lease_id, reason="late") for lease in leases[-2:]])
    assert not await leased(buffer)
    await buffer.consume("train", epoch, 0, batch.digest)
    await buffer.set_policy_version("train", epoch, 1)
    again = await leased(buffer)
    assert late <= {lease.group_id for lease in again}
    assert {(lease.policy_version, lease.attempt) for lease in again} == {(1, 1)}  # a release costs no attempt


def test_of_shards_the_one_that_is_furthest_behind_says_what_is_useless() -> None:
    ahead, behind = pb.LeaseGroupsResponse(oldest_version=5), pb.LeaseGroupsResponse(oldest_version=4)
    assert merged_leases([ahead, behind], 2).oldest_version == 4
    assert merged_leases([ahead], 2).oldest_version == 0  # the other may have an open step
