"""Gives access to a run's buffer: the live one, or one that is started over the run's folder meanwhile.

A buffer of several shards has the addresses of all of them, separated by commas.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from headrace.client.buffer import BufferClient
from headrace.errors import Unavailable
from headrace.launch.process import ServiceProcess
from headrace.launch.specs import processes, specs
from headrace.process.log_file import tail
from headrace.rpc.net import free_port
from headrace.run_folder import BUFFER, RunFolder, service_of

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
    address = ",".join(f"127.0.0.1:{free_port()}" for _ in processes(job, BUFFER))
    job = job.model_copy(update={"services": job.services.model_copy(update={"buffer_address": address})})
    async with AsyncExitStack() as stack:
        readers: list[ServiceProcess] = []
        for each in specs(job, BUFFER, folder, config=folder.job_file):
            log_file = folder.logs / f"{each.name}-reader.log"
            readers.append(await ServiceProcess.start(replace(each, name=f"{each.name} reader", log_file=log_file)))
            stack.push_async_callback(readers[-1].stop)
        await asyncio.gather(*(_answering(reader, start_seconds) for reader in readers))
        yield address


async def _answering(process: ServiceProcess, start_seconds: float) -> None:
    async with BufferClient(process.spec.address, deadline_seconds=start_seconds) as buffer:
        answers, ends = asyncio.create_task(buffer.position()), asyncio.create_task(process.wait())
        await asyncio.wait({answers, ends}, return_when=asyncio.FIRST_COMPLETED)
        if ends.done():
            answers.cancel()
            raise Unavailable(f"the ledger cannot be opened:\n{tail(process.spec.log_file)}")
        ends.cancel()
        await answers


def living_buffer(folder: RunFolder) -> str | None:
    """The address of the run's buffer, unless it has ended with the run. A shard that restarts is part of it."""
    services = folder.services()
    if BUFFER not in services:
        return None
    is_ours = any(service_of(name) == BUFFER and entry.pid is not None for name, entry in services.items())
    if is_ours and BUFFER not in folder.running_addresses():
        return None
    return services[BUFFER].address
