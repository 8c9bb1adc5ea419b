"""Gives access to a run's buffer: the live one, or one that is started over the run's folder meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from headrace.client.buffer import BufferClient
from headrace.errors import Unavailable
from headrace.launch.process import ServiceProcess
from headrace.launch.specs import spec
from headrace.process.log_file import tail
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder

START_SECONDS = 120.0
"""A large ledger takes its time to load."""


@asynccontextmanager
async def buffer_of_run(folder: RunFolder, start_seconds: float = START_SECONDS) -> AsyncIterator[str]:
    """Yields the buffer's address.

    Raises NotFound for a folder without a job, Unavailable when its ledger cannot be opened in time.
    """
    if address := living_buffer(folder):
        yield address
        return
    job = folder.job()
    address = f"127.0.0.1:{free_port()}"
    job = job.model_copy(update={"services": job.services.model_copy(update={"buffer_address": address})})
    reader = replace(spec(job, "buffer", folder), name="buffer reader", log_file=folder.logs / "buffer-reader.log")
    process = await ServiceProcess.start(reader)
    try:
        await _answering(address, process, start_seconds)
        yield address
    finally:
        await process.stop()


async def _answering(address: str, process: ServiceProcess, start_seconds: float) -> None:
    async with BufferClient(address, deadline_seconds=start_seconds) as buffer:
        answers, ends = asyncio.create_task(buffer.position()), asyncio.create_task(process.wait())
        await asyncio.wait({answers, ends}, return_when=asyncio.FIRST_COMPLETED)
        if ends.done():
            answers.cancel()
            raise Unavailable(f"the ledger cannot be opened:\n{tail(process.spec.log_file)}")
        ends.cancel()
        await answers


def living_buffer(folder: RunFolder) -> str | None:
    """The address of the run's buffer, unless it has ended with the run."""
    entry = folder.services().get("buffer")
    is_ours = entry is not None and entry.pid is not None
    if entry is None or (is_ours and "buffer" not in folder.running_services()):
        return None
    return entry.address
