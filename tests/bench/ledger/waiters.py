"""What producers that wait for work cost a buffer: through headrace's clients, and with a waiting call for each.

`python -m tests.bench.ledger.waiters`: waiters of ten clients on a buffer in a process of its own; its memory before
and with them, its CPU time while nothing happens, and the time from a batch of prompts to each lease.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.process.linux import resident_bytes
from tests.bench.cpu import cpu_seconds_of
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.processes.buffer_server import BufferProcess

NUM_CLIENTS = 10
NUM_PROMPTS = 256
"""Of the batch that arrives."""
_WAIT_SECONDS = 500.0
_SETTLED_BYTES = 256 << 10
"""Memory that grows by less in a second has all of the waiters."""


@dataclass(frozen=True)
class Cost:
    num_waiters: int
    bytes_before: int
    bytes_with: int
    idle_cpu: float
    """Share of a core."""
    wake_seconds: Sequence[float]

    @property
    def line(self) -> str:
        quantiles = statistics.quantiles(self.wake_seconds, n=100)
        mib = 1 << 20
        return (
            f"{self.num_waiters:,} waiters: {self.bytes_before / mib:.1f} MiB before, {self.bytes_with / mib:.1f} MiB "
            f"with them, {(self.bytes_with - self.bytes_before) / self.num_waiters / 1024:.2f} KiB each; "
            f"idle {100 * self.idle_cpu:.2f} % of a core; {len(self.wake_seconds)} groups arrive: "
            f"p50 {1000 * quantiles[49]:.0f} ms, p99 {1000 * quantiles[98]:.0f} ms"
        )


async def measured(num_waiters: int, folder: Path, *, shared: bool, idle_seconds: float) -> Cost:
    """Waiters on a new buffer, with a waiting call for each unless `shared`."""
    process = BufferProcess(folder, None)
    await process.start()
    try:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(BufferClient(process.address)) for _ in range(NUM_CLIENTS)]
            await clients[0].create_stream(pb.StreamConfig(name="own", n_samples_per_prompt=1, groups_per_step=2))
            for client in clients:
                await client.stats("own")
            before = resident_bytes(process.pid)
            woken: list[float] = []
            all_woken, num_prompts = asyncio.Event(), min(NUM_PROMPTS, num_waiters)

            async def wait(number: int) -> None:
                request_id = None if shared else uuid.uuid4().hex
                answer = await clients[number % NUM_CLIENTS].lease_groups(
                    "own", f"p{number}", 1, wait_seconds=_WAIT_SECONDS, request_id=request_id
                )
                assert len(answer.leases) == 1
                woken.append(time.perf_counter())
                if len(woken) == num_prompts:
                    all_woken.set()

            waiters = [asyncio.create_task(wait(number)) for number in range(num_waiters)]
            for client in clients:
                await client.stats("own")  # behind the calls that wait
            resident = await _settled_bytes(process.pid)
            cpu, began = cpu_seconds_of(process.pid), time.perf_counter()
            await asyncio.sleep(idle_seconds)
            idle = (cpu_seconds_of(process.pid) - cpu) / (time.perf_counter() - began)
            came = time.perf_counter()
            await clients[0].submit_prompts("own", text_prompts(*(f"q{i}" for i in range(num_prompts))))
            await all_woken.wait()
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)
            return Cost(num_waiters, before, resident, idle, [at - came for at in woken])
    finally:
        await process.kill()


async def _settled_bytes(pid: int) -> int:
    last = 0
    while (now := resident_bytes(pid)) > last + _SETTLED_BYTES:
        last = now
        await asyncio.sleep(1.0)
    return now


async def run(num_waiters: int, num_calls: int, idle_seconds: float) -> None:
    """Prints both, the baseline first."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=Path.cwd()) as folder:
        costs = []
        for count, shared in ((num_calls, False), (num_waiters, True)):
            own = Path(folder) / str(shared)
            own.mkdir()
            costs.append(await measured(count, own, shared=shared, idle_seconds=idle_seconds))
            print(f"{'headrace clients' if shared else 'a call each':16} {costs[-1].line}", flush=True)
    bare, ours = ((cost.bytes_with - cost.bytes_before) / cost.num_waiters for cost in costs)
    print(f"memory of a waiter, of one with a call of its own: {ours / bare:.4f}×")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiters", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    options = parser.parse_args()
    uvloop.run(run(options.waiters, options.calls, options.idle_seconds))


if __name__ == "__main__":
    main()
