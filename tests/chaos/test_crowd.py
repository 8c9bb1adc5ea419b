"""A crowd of producers that wait for work and of watchers that wait for events, on one server.

What a waiting call costs is measured against a bare grpc.aio server with the same calls in the same run. `make chaos`
brings 10,000 of each: about 600 MB, of which gRPC alone takes 500 (docs/scaling.md says where).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.client.buffer import BufferClient
from headrace.job.schema.services import BufferSection
from headrace.rpc.client import connect
from headrace.rpc.net import free_port
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import ROOT, BufferProcess

NUM_EACH = int(os.environ.get("HEADRACE_CROWD", "1000"))
MOST_TIMES_BARE = 1.4  # of about 24 KB: a thread for each lease would be more, or a page of events kept for each watch
_NUM_OLD_EVENTS = 100
_NUM_STEPS = 5
_CALLS_PER_CHANNEL = 1_000
_WAIT_SECONDS = 600.0


def resident_bytes(pid: int, kind: str = "VmRSS") -> int:
    """Now. RssAnon is without the pages of files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{kind}:")) * 1024


class Crowd:
    """Waiting leases and open watches on a server that says how many of them it is busy with.

    No answer says that: a call may be answered before others that came first have begun.
    """

    def __init__(self, address: str, num_begun: Callable[[], Awaitable[int]]) -> None:
        self.calls: list[Any] = []
        self._address = address
        self._num_begun = num_begun
        self._channels: list[grpc.aio.Channel] = []

    async def gather(self, pid: int) -> float:
        """NUM_EACH of both; returns the bytes that a call costs.

        They come in equal steps, and the median step counts: threads, imports and the allocator's arenas come once or
        now and then, but what a call holds is in every step.
        """
        sizes = [resident_bytes(pid, "RssAnon")]
        for step in range(_NUM_STEPS):
            await self._grow(NUM_EACH * (step + 1) // _NUM_STEPS)
            sizes.append(resident_bytes(pid, "RssAnon"))
        return statistics.median(after - before for before, after in pairwise(sizes)) * _NUM_STEPS / (2 * NUM_EACH)

    async def close(self) -> None:
        for call in self.calls:
            call.cancel()
        for channel in self._channels:
            await channel.close(None)

    async def _grow(self, num_each: int) -> None:
        """All have begun when it returns."""
        for number in range(len(self.calls) // 2, num_each):
            if number % _CALLS_PER_CHANNEL == 0:
                self._channels.append(connect(self._address))
            stub = buffer_pb2_grpc.BufferServiceStub(self._channels[-1])  # type: ignore[no-untyped-call]
            request = pb.LeaseGroupsRequest(
                stream="train", producer_id="p", request_id=f"{number}", max_groups=1, wait_seconds=_WAIT_SECONDS
            )
            self.calls.append(stub.LeaseGroups(request, timeout=_WAIT_SECONDS, wait_for_ready=True))
            self.calls.append(stub.Watch(pb.WatchRequest(), wait_for_ready=True))
        while await self._num_begun() < len(self.calls):
            await asyncio.sleep(0.01)


async def bare_cost() -> tuple[int, float]:
    """(bytes resident, bytes that a waiting call costs) of a server that does nothing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fakes.bare_server"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    address = process.stdout.readline().strip()
    try:
        async with connect(address) as channel:
            stub = buffer_pb2_grpc.BufferServiceStub(channel)  # type: ignore[no-untyped-call]

            async def num_waiting() -> int:
                return int((await stub.GetStats(pb.GetStatsRequest(), timeout=60, wait_for_ready=True)).position)

            crowd = Crowd(address, num_waiting)
            cost = await crowd.gather(process.pid)
            resident = resident_bytes(process.pid)
            await crowd.close()
            return resident, cost
    finally:
        process.kill()
        process.wait()


def in_progress(metrics_address: str) -> int:
    """Calls, as a server's own metrics have it."""
    with urlopen(f"http://{metrics_address}/metrics", timeout=60) as page:
        return next(int(float(line.split()[1])) for line in page if line.startswith(b"headrace_rpc_in_progress "))


@pytest.mark.timeout(600)
async def test_a_crowd_that_waits_costs_little_more_than_grpc_itself(tmp_path: Path) -> None:
    bare_resident, bare = await bare_cost()
    buffer = BufferProcess(tmp_path, None, buffer=BufferSection(max_staleness=1))
    metrics_address = f"127.0.0.1:{free_port()}"
    await buffer.start(metrics_address=metrics_address)
    try:
        async with BufferClient(buffer.address, deadline_seconds=300) as client:
            await client.create_stream(pb.StreamConfig(name="old", n_samples_per_prompt=1, groups_per_step=1))
            await client.submit_prompts("old", text_prompts(*map(str, range(_NUM_OLD_EVENTS))))
            crowd = Crowd(buffer.address, lambda: asyncio.to_thread(in_progress, metrics_address))
            ours = await crowd.gather(buffer.pid)
            print(
                f"{NUM_EACH:,} waiting leases and {NUM_EACH:,} open watches: "
                f"{resident_bytes(buffer.pid) / 1e6:.0f} MB resident, {ours / 1e3:.1f} KB a call; "
                f"a bare grpc.aio server: {bare_resident / 1e6:.0f} MB, {bare / 1e3:.1f} KB"
            )
            assert ours < MOST_TIMES_BARE * bare
            await client.submit_prompts("train", text_prompts("a"))
            waiting = [asyncio.ensure_future(call) for call in crowd.calls[::2]]
            answered, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            (lease,) = answered.pop().result().leases
            (result,) = await client.put_groups([complete_put(lease)])
            assert result.state == pb.GROUP_STATE_READY
            await crowd.close()
    finally:
        await buffer.kill()
