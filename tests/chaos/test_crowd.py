"""A crowd of producers that wait for work and of watchers that wait for events, on one server.

What a waiting call costs is measured against a bare grpc.aio server with the same calls in the same run. `make chaos`
brings 10,000 of each.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.client.buffer import BufferClient
from headrace.config.job import BufferSection
from headrace.rpc.channel import connect
from tests.support.buffer_samples import complete_put, text_prompts
from tests.support.buffer_server import ROOT, BufferProcess

NUM_EACH = int(os.environ.get("HEADRACE_CROWD", "1000"))
MOST_TIMES_BARE = 1.5
_CALLS_PER_CHANNEL = 1_000
_WAIT_SECONDS = 600.0


def resident_bytes(pid: int) -> int:
    """Now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) * 1024


@asynccontextmanager
async def crowd(address: str) -> AsyncIterator[list[grpc.aio.Call]]:
    """NUM_EACH waiting leases and open watches; all have reached the server."""
    channels = [connect(address) for _ in range(-(-NUM_EACH // _CALLS_PER_CHANNEL))]
    calls: list[grpc.aio.Call] = []
    try:
        for k, channel in enumerate(channels):
            stub = buffer_pb2_grpc.BufferServiceStub(channel)  # type: ignore[no-untyped-call]
            for i in range(min(_CALLS_PER_CHANNEL, NUM_EACH - k * _CALLS_PER_CHANNEL)):
                request = pb.LeaseGroupsRequest(
                    stream="train", producer_id="p", request_id=f"{k}/{i}", max_groups=1, wait_seconds=_WAIT_SECONDS
                )
                calls.append(stub.LeaseGroups(request, timeout=_WAIT_SECONDS, wait_for_ready=True))
                calls.append(stub.Watch(pb.WatchRequest(stream="train"), wait_for_ready=True))
            await stub.GetStats(pb.GetStatsRequest(), timeout=120, wait_for_ready=True)  # behind them in the connection
        yield calls
    finally:
        for call in calls:
            call.cancel()
        for channel in channels:
            await channel.close(None)


async def bare_cost() -> tuple[int, float]:
    """(bytes resident, bytes that a waiting call costs) of a server that does nothing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.bare_server"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    try:
        address = process.stdout.readline().strip()
        before = resident_bytes(process.pid)
        async with crowd(address):
            resident = resident_bytes(process.pid)
            return resident, (resident - before) / (2 * NUM_EACH)
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
async def test_a_crowd_that_waits_costs_little_more_than_grpc_itself(tmp_path: Path) -> None:
    bare_resident, bare = await bare_cost()
    buffer = BufferProcess(tmp_path, None, buffer=BufferSection(max_staleness=1, buffer_store="segments"))
    await buffer.start()
    try:
        async with BufferClient(buffer.address, deadline_seconds=300) as client:
            await client.stats("train")
            before = resident_bytes(buffer.pid)
            async with crowd(buffer.address) as calls:
                resident = resident_bytes(buffer.pid)
                ours = (resident - before) / (2 * NUM_EACH)
                print(
                    f"{NUM_EACH:,} waiting leases and {NUM_EACH:,} open watches: {resident / 1e6:.0f} MB resident, "
                    f"{ours / 1e3:.1f} KB a call; "
                    f"a bare grpc.aio server: {bare_resident / 1e6:.0f} MB, {bare / 1e3:.1f} KB"
                )
                assert ours < MOST_TIMES_BARE * bare
                await client.submit_prompts("train", text_prompts("a"))
                waiting = [asyncio.ensure_future(call) for call in calls[::2]]
                answered, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                (lease,) = answered.pop().result().leases
                (result,) = await client.put_groups([complete_put(lease)])
                assert result.state == pb.GROUP_STATE_READY
    finally:
        await buffer.kill()
