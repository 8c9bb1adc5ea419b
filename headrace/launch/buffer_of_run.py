"""Gives access to a run's buffer: the live one, or one that is started over the run's ledger, or a copy of it.

A buffer of several shards has the addresses of all of them, separated by commas.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from headrace.client.buffer import BufferClient
from headrace.disk import lock
from headrace.errors import FailedPrecondition, ResourceExhausted, Unavailable
from headrace.job.schema.job import Job
from headrace.launch.process import GRACE_SECONDS, ServiceProcess
from headrace.launch.specs import processes, specs
from headrace.process.log_file import tail
from headrace.rpc.net import free_port
from headrace.run_folder import BUFFER, RunFolder, number_of, service_of

START_SECONDS = 120.0
"""A large ledger takes its time to load."""
_COLUMNS = "columns"
_WHOLE_COLUMN = re.compile(r"[0-9a-f]{64}")
_LOCK = "lock"
"""In each ledger's folder: the buffer that has it open holds it."""


@asynccontextmanager
async def buffer_of_run(
    folder: RunFolder, start_seconds: float = START_SECONDS, *, read_only: bool = False
) -> AsyncIterator[str]:
    """Yields the buffer's address.

    `read_only`: nothing in the folder is changed. A buffer writes at its start (it repairs what a kill left), so it is
    started over a copy of the ledger. Raises NotFound for a folder without a job, Unavailable when its ledger cannot
    be opened in time, ResourceExhausted when there is no room for the copy.
    """
    if address := living_buffer(folder):
        yield address
        return
    job, source = folder.job(), folder
    address = ",".join(f"127.0.0.1:{free_port()}" for _ in processes(job, BUFFER))
    job = job.model_copy(update={"services": job.services.model_copy(update={"buffer_address": address})})
    async with AsyncExitStack() as stack:
        if read_only:
            folder = stack.enter_context(_copied(source, job))
        readers: list[ServiceProcess] = []
        for each in specs(job, BUFFER, folder, config=source.job_file):
            log_file = folder.logs / f"{each.name}-reader.log"
            reader = ServiceProcess(replace(each, name=f"{each.name} reader", log_file=log_file))
            await reader.start()
            stack.push_async_callback(reader.stop, GRACE_SECONDS)
            readers.append(reader)
        await asyncio.gather(*(_answering(reader, start_seconds) for reader in readers))
        yield address


@contextmanager
def _copied(run: RunFolder, job: Job) -> Iterator[RunFolder]:
    """A temporary folder with the run's ledger, and nothing else of the run.

    Raises FailedPrecondition while a buffer has the ledger open.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-ledger-") as name:
        copy = RunFolder(Path(name))
        copy.logs.mkdir()
        ledgers = [number_of(process) for process in processes(job, BUFFER)]
        _require_room([file for shard in ledgers for file in _copied_files(run.ledger_of(shard))], copy.path)
        for shard in ledgers:
            copy.ledger_of(shard).mkdir(parents=True)
            _copy(run.ledger_of(shard), copy.ledger_of(shard))
        yield copy


def _copy(ledger: Path, target: Path) -> None:
    """Copies a ledger that no buffer has open, but for large columns: their files never change and are linked to."""
    with ExitStack() as stack:
        if (ledger / _LOCK).is_file():
            held = stack.enter_context((ledger / _LOCK).open("rb"))
            if not lock(held, shared=True):
                raise FailedPrecondition(f"{ledger} is in use by another buffer: repeat the command when it has ended")
        for file in _copied_files(ledger):
            new = target / file.relative_to(ledger)
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, new)
        for column in (ledger / _COLUMNS).glob("*"):
            if _WHOLE_COLUMN.fullmatch(column.name):
                (target / _COLUMNS).mkdir(exist_ok=True)
                (target / _COLUMNS / column.name).symlink_to(column.absolute())


def _copied_files(ledger: Path) -> list[Path]:
    files = (file for file in ledger.rglob("*") if file.is_file() and file.parent.name != _COLUMNS)
    return [file for file in files if file.name != _LOCK]


def _require_room(files: Sequence[Path], target: Path) -> None:
    num_bytes, free_bytes = sum(file.stat().st_size for file in files), shutil.disk_usage(target).free
    if num_bytes > free_bytes:
        raise ResourceExhausted(
            f"the ledger is copied to be read, and its {num_bytes:,} bytes exceed the {free_bytes:,} that are free in "
            f"{target.parent}: set TMPDIR to a folder on a disk with more room"
        )


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
