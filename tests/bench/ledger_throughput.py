"""Samples a second into and out of a durable buffer, beside a bare disk and a bare gRPC stream.

`python -m tests.bench.ledger_throughput`: random bytes, calls of 16 samples, 16 in flight; every server is a process of
its own; our servers and clients run on uvloop. One run, so that the ratios mean something.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.digest import digest_of
from headrace.job.schema.services import BufferSection
from headrace.trajectory import pack_column
from tests.bench.cpu import cpu_seconds
from tests.bench.raw_stream import raw_samples_per_second
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.processes.buffer_server import BufferProcess

SIZES = (2_300, 18_000, 147_000, 1_000_000)
NUM_SAMPLES = {2_300: 8_192, 18_000: 4_096, 147_000: 1_024, 1_000_000: 256}
PER_CALL = 16
PER_GROUP = 8
IN_FLIGHT = 16
ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """Samples a second, the median of the rounds."""

    put: float
    fetch: float
    put_cpu: float
    """Seconds of client and server for one sample."""


async def together(count: int, act: Callable[[int], Awaitable[object]], in_flight: int = IN_FLIGHT) -> float:
    """Seconds for `count` calls, `in_flight` at a time."""
    numbers = iter(range(count))

    async def one() -> None:
        for number in numbers:
            await act(number)

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(in_flight)))
    return time.perf_counter() - started


async def leased(client: BufferClient, stream: str, num_groups: int) -> list[pb.GroupLease]:
    """So many groups of a stream of their own."""
    await client.create_stream(pb.StreamConfig(name=stream, n_samples_per_prompt=PER_GROUP, groups_per_step=1))
    leases: list[pb.GroupLease] = []
    for first in range(0, num_groups, 500):
        names = [f"q{i}" for i in range(first, min(first + 500, num_groups))]
        await client.submit_prompts(stream, text_prompts(*names))
        leases += (await client.lease_groups(stream, "bench", len(names))).leases
    return leases


def put_of(lease: pb.GroupLease, size: int) -> pb.GroupPut:
    samples = [sample(lease, index, payload_of(size)) for index in range(PER_GROUP)]
    return pb.GroupPut(
        lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=samples
    )


def payload_of(size: int) -> bytes:
    """About so many bytes: 64 tokens of prompt, 256 of response, and a column of noise."""
    tokens = np.random.randint(0, 1 << 17, 320, np.int32)
    columns: dict[str, np.ndarray] = {
        "tokens": tokens,
        "loss_mask": np.ones(256, np.uint8),
        "rollout_log_probs": np.zeros(256, np.float32),
    }
    used = sum(array.nbytes for array in columns.values())
    noise = {"noise": np.frombuffer(os.urandom(max(size - used, 0)), np.uint8)} if size > used else {}
    packed = [pack_column(name, array) for name, array in (columns | noise).items()]
    return sample_pb2.SamplePayload(columns=packed).SerializeToString()


def sample(lease: pb.GroupLease, index: int, payload: bytes) -> sample_pb2.Sample:
    envelope = sample_pb2.SampleEnvelope(
        sample_id=f"{lease.lease_id}/{index}",
        group_id=lease.group_id,
        index=index,
        status=sample_pb2.SAMPLE_STATUS_COMPLETED,
        reward=0.5,
        prompt_tokens=64,
        response_tokens=256,
        trained_tokens=256,
        policy_ranges=[sample_pb2.PolicyRange(policy_version=0, start=0, end=256)],
        digest=digest_of(payload),
        payload_bytes=len(payload),
    )
    return sample_pb2.Sample(envelope=envelope, payload=payload)


async def ours(client: BufferClient, pid: int, size: int) -> Rates:
    puts_per_second, fetches_per_second, cpu = [], [], []
    count = NUM_SAMPLES[size]
    for number in range(ROUNDS):
        stream = f"bench/{size}/{number}"
        puts = [put_of(lease, size) for lease in await leased(client, stream, count // PER_GROUP)]
        calls = [puts[i : i + PER_CALL // PER_GROUP] for i in range(0, len(puts), PER_CALL // PER_GROUP)]
        before = cpu_seconds(pid)
        seconds = await together(len(calls), lambda i, calls=calls: client.put_groups(calls[i]))  # type: ignore[misc]
        cpu.append((cpu_seconds(pid) - before) / count)
        puts_per_second.append(count / seconds)
        ids = [[s.envelope.sample_id for put in call for s in put.samples] for call in calls]

        async def fetch(i: int, ids: Sequence[Sequence[str]] = ids, stream: str = stream) -> None:
            assert len(await client.fetch_samples(stream, ids[i])) == PER_CALL

        fetches_per_second.append(count / await together(len(ids), fetch))
    return Rates(*map(statistics.median, (puts_per_second, fetches_per_second, cpu)))


def raw_disk(folder: Path, size: int) -> float:
    """Append and fdatasync, 16 samples at a time."""
    calls = NUM_SAMPLES[size] // PER_CALL
    parts = [os.urandom(size) for _ in range(PER_CALL)]
    rates = []
    for number in range(ROUNDS):
        path = folder / f"raw-{size}-{number}"
        with path.open("xb", buffering=0) as file:
            started = time.perf_counter()
            for _ in range(calls):
                assert os.writev(file.fileno(), parts) == size * PER_CALL
                os.fdatasync(file.fileno())
            rates.append(calls * PER_CALL / (time.perf_counter() - started))
        path.unlink()
    return statistics.median(rates)


async def lease_batch_seconds(client: BufferClient, num_steps: int = 6, asks: int = 10) -> list[float]:
    """Of LeaseBatch for 1,024 groups of 8."""
    stream, groups = "bench/batch", 1_024
    await client.create_stream(pb.StreamConfig(name=stream, n_samples_per_prompt=PER_GROUP, groups_per_step=groups))
    epoch = (await client.rewind(stream, 0)).epoch
    seconds: list[float] = []
    for step in range(num_steps):
        for first in range(0, groups, 64):
            await client.submit_prompts(stream, text_prompts(*(f"{step}/{i}" for i in range(first, first + 64))))
            leases = (await client.lease_groups(stream, "bench", 64)).leases
            await client.put_groups([put_of(lease, 2_300) for lease in leases])
        for _ in range(asks):
            started = time.perf_counter()
            batch = await client.try_lease_batch(stream, epoch, step, wait_seconds=5.0)
            seconds.append(time.perf_counter() - started)
        await client.consume(stream, epoch, step, batch.digest)
    return sorted(seconds)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=Path.cwd()) as folder:
        buffer = BufferProcess(Path(folder), None, buffer=BufferSection(max_staleness=0))
        await buffer.start()
        try:
            async with BufferClient(buffer.address) as client:
                for size in SIZES:
                    own = await ours(client, buffer.pid, size)
                    raw = await raw_samples_per_second(size, NUM_SAMPLES[size], PER_CALL, IN_FLIGHT)
                    report(size, own, raw_disk(Path(folder), size), raw)
                seconds = await lease_batch_seconds(client)
                p50, p99 = (1000 * seconds[int(len(seconds) * q)] for q in (0.5, 0.99))
                print(f"LeaseBatch of 1,024 × 8 samples: p50 {p50:.0f} ms, p99 {p99:.0f} ms ({len(seconds)} calls)")
        finally:
            await buffer.kill()


def report(size: int, own: Rates, disk: float, raw: tuple[float, float]) -> None:
    wire, wire_cpu = raw
    print(f"{size / 1000:g} KB a sample, samples a second (median of {ROUNDS})")
    print(f"  put    {own.put:8.0f}   append + fdatasync {own.put / disk:.2f}×   gRPC bytes {own.put / wire:.2f}×")
    print(f"         CPU of client and server {own.put_cpu * 1e6:.0f} µs a sample; gRPC bytes {wire_cpu * 1e6:.0f}")
    print(f"  fetch  {own.fetch:8.0f}   gRPC bytes {own.fetch / wire:.2f}×", flush=True)


if __name__ == "__main__":
    uvloop.run(main())
