"""`python -m tests.chaos.recovery`: how long a buffer with 100,000 samples is away after kill -9.

Counted from the kill to the first answer to a client that waits: the start of Python (with the modules' bytecode there,
as where a package was installed), the opening of the ledger, the reconnect. HEADRACE_RECOVERIES and HEADRACE_SAMPLES
change how often and how much; HEADRACE_STORE which store.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.job.schema.services import BufferSection
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import BufferProcess

NUM_SAMPLES = int(os.environ.get("HEADRACE_SAMPLES", "100000"))
NUM_RECOVERIES = int(os.environ.get("HEADRACE_RECOVERIES", "100"))
STORE = os.environ.get("HEADRACE_STORE", "sqlite")
_SAMPLES_PER_GROUP = 8
_GROUPS_AT_ONCE = 128  # a put has 1,024 samples at most


async def fill(client: BufferClient) -> None:
    """All samples READY."""
    await client.create_stream(
        pb.StreamConfig(name="full", n_samples_per_prompt=_SAMPLES_PER_GROUP, groups_per_step=128)
    )
    for first in range(0, NUM_SAMPLES // _SAMPLES_PER_GROUP, _GROUPS_AT_ONCE):
        names = [f"q{i}" for i in range(first, first + _GROUPS_AT_ONCE)]
        await client.submit_prompts("full", text_prompts(*names))
        leases = (await client.lease_groups("full", "p", _GROUPS_AT_ONCE)).leases
        await client.put_groups([complete_put(lease) for lease in leases])


async def recover(buffer: BufferProcess, client: BufferClient) -> tuple[float, float]:
    """Seconds from the kill to the first answer, and how many of them the new process computed."""
    killed = time.monotonic()
    await buffer.kill()
    await buffer.start()
    stats = await client.stats("full")
    assert stats.groups["READY"] >= NUM_SAMPLES // _SAMPLES_PER_GROUP
    away = time.monotonic() - killed
    fields = Path(f"/proc/{buffer.pid}/stat").read_text().rpartition(")")[2].split()
    return away, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentiles(seconds: Sequence[float]) -> str:
    """p50, p99 and the longest, in words."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.99))
    return f"p50 {p50:.2f} s, p99 {p99:.2f} s, longest {ordered[-1]:.2f} s"


async def main() -> None:
    """Prints p50, p99 and the longest."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        section = BufferSection.model_validate({"buffer_store": STORE})
        buffer = BufferProcess(Path(folder), None, buffer=section)
        await buffer.start()
        try:
            async with BufferClient(buffer.address) as client:
                await fill(client)
                found = [await recover(buffer, client) for _ in range(NUM_RECOVERIES)]
        finally:
            await buffer.kill()
    away, computed = zip(*found, strict=True)
    print(
        f"recovery after kill -9 with {NUM_SAMPLES:,} samples held ({STORE}), {len(found)} times: {percentiles(away)}"
    )
    print(f"  of which CPU time of the buffer, whatever else the machine does: {percentiles(computed)}")


if __name__ == "__main__":
    asyncio.run(main())
