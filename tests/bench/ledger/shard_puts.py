"""Durable puts into one buffer and into two shards of a ledger, by the same writers, in turn in one call.

`python -m tests.bench.ledger.shard_puts`: calls of 4 groups of 8 samples, so many in flight that no buffer waits for
puts; a process for every buffer and every writer. Samples a second show what shards bring on this machine, where
buffers and writers share the cores. Samples in a second of the busiest buffer's CPU time show what they take where it
has enough.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import Buffer
from headrace.client.open import open_buffer
from headrace.job.schema.services import BufferSection
from tests.bench.cpu import cpu_seconds_of
from tests.bench.ledger_throughput import PER_GROUP, put_of, together
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.processes.buffer_server import ROOT, BufferProcess

GROUPS = {2_300: 4_096, 18_000: 1_024, 147_000: 256}
"""Of each writer, by bytes a sample."""
GROUPS_PER_CALL = 4
IN_FLIGHT = 64
"""Calls of a writer: the client joins them to requests of 1 MiB, for one buffer as for two."""
NUM_WRITERS = 2
SHARDS = (1, 2)
ROUNDS = 3
_PROMPTS_AT_ONCE = 500


@dataclass(frozen=True)
class Puts:
    """One round of puts into a number of buffers."""

    num_samples: int
    seconds: float
    buffer_cpu: Sequence[float]
    """Seconds of each buffer."""
    writer_cpu: float
    """Seconds of all writers together."""

    @property
    def per_second(self) -> float:
        return self.num_samples / self.seconds

    @property
    def per_cpu_second(self) -> float:
        """Samples in a second of CPU time of all buffers and writers together."""
        return self.num_samples / (sum(self.buffer_cpu) + self.writer_cpu)

    @property
    def per_busiest_cpu_second(self) -> float:
        """Samples in a second of CPU time of the buffer that used most."""
        return self.num_samples / max(self.buffer_cpu)


async def measured(num_shards: int, size: int, num_groups: int, folder: Path) -> Puts:
    """Puts `num_groups` of each writer, with samples of `size` bytes, into a new ledger."""
    async with _buffers(num_shards, folder) as buffers, AsyncExitStack() as stack:
        address = ",".join(buffer.address for buffer in buffers)
        names = [f"bench/{number}" for number in range(NUM_WRITERS)]
        writers = [await stack.enter_async_context(_writer(name, address, size, num_groups)) for name in names]
        for writer in writers:
            await _said(writer)
        before, started = [cpu_seconds_of(buffer.pid) for buffer in buffers], time.perf_counter()
        for writer in writers:
            assert writer.stdin
            writer.stdin.write(b"go\n")
        cpu = [json.loads(await _said(writer)) for writer in writers]
        seconds = time.perf_counter() - started
        used = [cpu_seconds_of(buffer.pid) - then for buffer, then in zip(buffers, before, strict=True)]
    return Puts(NUM_WRITERS * num_groups * PER_GROUP, seconds, used, sum(cpu))


@asynccontextmanager
async def _buffers(num_shards: int, folder: Path) -> AsyncIterator[list[BufferProcess]]:
    buffers: list[BufferProcess] = []
    with tempfile.TemporaryDirectory(dir=folder) as ledgers:
        try:
            for shard in range(num_shards):
                own = Path(ledgers) / str(shard)
                own.mkdir()
                buffers.append(BufferProcess(own, None, buffer=BufferSection(max_staleness=0)))
                await buffers[-1].start()
            yield buffers
        finally:
            for buffer in buffers:
                await buffer.kill()


@asynccontextmanager
async def _writer(name: str, address: str, size: int, num_groups: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.ledger.shard_puts", name, address, str(size), str(num_groups),
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _said(writer: asyncio.subprocess.Process) -> bytes:
    assert writer.stdout
    line = await writer.stdout.readline()
    assert line, "a writer ended before its time: its error is above"
    return line


async def write(name: str, address: str, size: int, num_groups: int) -> None:
    """A writer: it leases its groups, waits for a line on stdin, puts them, and prints its CPU seconds."""
    async with open_buffer(address, deadline_seconds=120.0) as buffer:
        leases = await _leased(buffer, name, num_groups, len(address.split(",")))
        random.Random(0).shuffle(leases)  # as groups finish: a call has those of any shard
        puts = [put_of(lease, size) for lease in leases]
        calls = [puts[first : first + GROUPS_PER_CALL] for first in range(0, num_groups, GROUPS_PER_CALL)]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

        async def put(number: int) -> None:
            assert not any(result.HasField("refused") for result in await buffer.put_groups(calls[number]))

        before = time.process_time()
        await together(len(calls), put, IN_FLIGHT)
        print(time.process_time() - before, flush=True)


async def _leased(buffer: Buffer, stream: str, num_groups: int, num_shards: int) -> list[pb.GroupLease]:
    config = pb.StreamConfig(name=stream, n_samples_per_prompt=PER_GROUP, groups_per_step=num_shards)
    await buffer.create_stream(config)
    leases: list[pb.GroupLease] = []
    for first in range(0, num_groups, _PROMPTS_AT_ONCE):
        end = min(first + _PROMPTS_AT_ONCE, num_groups)
        await buffer.submit_prompts(stream, text_prompts(*(f"q{i}" for i in range(first, end))))
        while len(leases) < end:
            leases += (await buffer.lease_groups(stream, "bench", end - len(leases), wait_seconds=5.0)).leases
    return leases


def report(size: int, rounds: dict[int, list[Puts]]) -> str:
    """The medians of the rounds, and their ratios."""
    lines = [f"{size / 1000:g} KB a sample, {NUM_WRITERS} writers, {os.cpu_count()} cores (median of {ROUNDS})"]
    for num_shards, puts in rounds.items():
        rate = statistics.median(one.per_second for one in puts)
        buffers = statistics.median(1e6 * sum(one.buffer_cpu) / one.num_samples for one in puts)
        writers = statistics.median(1e6 * one.writer_cpu / one.num_samples for one in puts)
        lines.append(
            f"  {num_shards} buffer{'s' if num_shards > 1 else ' '}  {rate:8.0f} samples a second; "
            f"CPU of a sample: buffers {buffers:.0f} µs, writers {writers:.0f} µs"
        )
    a_second, most, a_cpu_second = ratios(rounds, os.cpu_count() or 1)
    return "\n".join(
        [
            *lines,
            f"  two of one: {a_second:.2f}× a second, where these cores bear {most:.2f}×; "
            f"{a_cpu_second:.2f}× a CPU second of the busiest buffer",
        ]
    )


def ratios(rounds: dict[int, list[Puts]], num_cores: int) -> tuple[float, float, float]:
    """Two shards' puts of one buffer's: in a second, at most by the cores' time, and a CPU second of the busiest."""
    pairs = list(zip(*(rounds[num_shards] for num_shards in SHARDS), strict=True))
    return (
        statistics.median(two.per_second / one.per_second for one, two in pairs),
        statistics.median(num_cores * two.per_cpu_second / one.per_second for one, two in pairs),
        statistics.median(two.per_busiest_cpu_second / one.per_busiest_cpu_second for one, two in pairs),
    )


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=Path.cwd()) as folder:
        for size, num_groups in GROUPS.items():
            rounds: dict[int, list[Puts]] = {num_shards: [] for num_shards in SHARDS}
            for _ in range(ROUNDS):
                for num_shards in SHARDS:
                    rounds[num_shards].append(await measured(num_shards, size, num_groups, Path(folder)))
            print(report(size, rounds), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        uvloop.run(write(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        uvloop.run(main())
