"""`python -m tests.chaos.survival.backup FOLDER`: a backup onto a disk that fills up; prints JSON."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
from pathlib import Path

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.main import main as headrace
from headrace.client.buffer import BufferClient
from services.buffer.store.sqlite.store import SqliteStore
from tests.support.faults.small_disk import SmallDisk
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import served_buffer


async def main(folder: Path) -> None:
    disk = SmallDisk(folder / "small", 4)
    backup, restored = disk.folder / "backup", folder / "restored"
    async with served_buffer(SqliteStore(folder / "ledger")) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=1))
        await client.submit_prompts("train", text_prompts("a"))
        (lease,) = (await client.lease_groups("train", "p", 1)).leases
        await client.put_groups([complete_put(lease)])
        disk.fill(left_bytes=20 << 10)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = await run("buffer", "backup", server.address, str(backup))
            found = await run("buffer", "restore", str(backup), str(restored))
        disk.free()
        again = await run("buffer", "backup", server.address, str(disk.folder / "again"))
    print(json.dumps({"code": code, "message": said.getvalue(), "restored": found, "again": again}))


async def run(*words: str) -> int:
    """The command's exit code."""
    return await asyncio.to_thread(headrace, list(words))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
