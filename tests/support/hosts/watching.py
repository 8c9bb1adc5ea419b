"""`python -m tests.support.hosts.watching serve|watch ADDRESS`: a buffer, or its client.

The client watches and waits for a lease. It says when both have begun, when the watch has ended and why, and how many
groups it was given at last.
"""

from __future__ import annotations

import asyncio
import sys
import time

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import Unavailable
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.processes.buffer_server import served_buffer


async def serve(address: str) -> None:
    """Until it is ended."""
    async with served_buffer(MemoryStore(), address=address, insecure=True):
        await asyncio.Event().wait()


async def watch(address: str) -> None:
    async with BufferClient(address) as buffer:
        await buffer.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=1, groups_per_step=1))
        await buffer.submit_prompts("train", text_prompts("a"))
        await buffer.lease_groups("train", "p", 1)  # so that there are events to see, and nothing to lease
        leasing = asyncio.create_task(buffer.lease_groups("train", "p", 1, wait_seconds=600))
        began = time.monotonic()
        try:
            async for event in buffer.watch("train"):
                print("watching", event.position, flush=True)
                began = time.monotonic()
        except Unavailable as error:
            print(f"silent for {time.monotonic() - began:.0f} s: {error.message}", flush=True)
        await buffer.submit_prompts("train", text_prompts("b"))
        print("leased", len((await leasing).leases), flush=True)


if __name__ == "__main__":
    asyncio.run({"serve": serve, "watch": watch}[sys.argv[1]](sys.argv[2]))
