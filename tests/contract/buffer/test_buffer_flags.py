"""Flags of the buffer that only its process reads, on such a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import OutOfRange, ResourceExhausted
from headrace.job.schema.services import BufferSection
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import BufferProcess

STREAM = pb.StreamConfig(name="s", n_samples_per_prompt=2, groups_per_step=1, max_queued_groups=100)


async def test_min_free_disk_bytes_and_retain_events_reach_the_service(tmp_path: Path) -> None:
    flags = BufferSection(min_free_disk_bytes=1 << 53, retain_events=16)
    buffer = BufferProcess(tmp_path, None, buffer=flags)
    await buffer.start()
    try:
        async with BufferClient(buffer.address) as client:
            await client.create_stream(STREAM)
            for number in range(40):
                await client.submit_prompts("s", text_prompts(f"p{number}"))
            with pytest.raises(OutOfRange, match="are deleted \\(retain_events\\)"):
                await anext(client.watch("s", 1))
            (lease,) = (await client.lease_groups("s", "me", 1)).leases
            with pytest.raises(ResourceExhausted, match=f"min_free_disk_bytes is {1 << 53}"):
                await client.put_groups([complete_put(lease)])
    finally:
        await buffer.kill()
