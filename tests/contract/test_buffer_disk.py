"""A disk that fails or fills up: the buffer ends with one line or refuses puts, and nothing answered is lost."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.config.job import BufferSection
from headrace.errors import ResourceExhausted
from services.buffer.store.sqlite.store import SqliteStore
from tests.support.buffer_samples import complete_put, text_prompts
from tests.support.buffer_server import BufferProcess, served_buffer


def process(folder: Path) -> BufferProcess:
    return BufferProcess(folder, None, buffer=BufferSection(max_staleness=9))


@pytest.mark.parametrize("failpoint", ["sync:EIO:3", "half-written:ENOSPC:3", "written:kill:3", "commit:EIO:9"])
async def test_a_disk_that_fails_ends_the_process_and_clients_go_on_after_its_restart(
    tmp_path: Path, failpoint: str
) -> None:
    buffer = process(tmp_path)
    await buffer.start(failpoint)
    try:
        async with BufferClient(buffer.address) as client, asyncio.timeout(180):
            working = asyncio.create_task(work(client))
            assert await buffer.wait() == (-9 if "kill" in failpoint else 1)
            if "kill" not in failpoint:
                assert "Errno" in json.loads(buffer.log.splitlines()[-1])["message"]
            await buffer.start()
            acknowledged = await working
            samples = await client.fetch_samples("train", sorted(acknowledged))
            assert {s.envelope.sample_id: s.envelope.digest for s in samples} == acknowledged
    finally:
        await buffer.kill()


async def work(client: BufferClient) -> dict[str, bytes]:
    """Digests of what was answered OK, by sample."""
    acknowledged: dict[str, bytes] = {}
    for number in range(6):
        await client.submit_prompts("train", text_prompts(f"q{number}"))
        for lease in (await client.lease_groups("train", "p", 1)).leases:
            put = complete_put(lease)
            (result,) = await client.put_groups([put])
            assert result.state == pb.GROUP_STATE_READY
            acknowledged.update((s.envelope.sample_id, s.envelope.digest) for s in put.samples)
    assert len(acknowledged) == 12
    return acknowledged


class NearlyFull(SqliteStore):
    """A store on a disk with so many bytes left."""

    free = 1 << 30

    def free_bytes(self) -> int:
        return self.free


async def test_below_the_disk_reserve_puts_are_refused_and_consume_and_commit_go_on(tmp_path: Path) -> None:
    store = NearlyFull(tmp_path)
    async with (
        served_buffer(store, min_free_disk_bytes=1 << 20) as (_, server),
        BufferClient(server.address) as client,
    ):
        await client.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=1))
        await client.submit_prompts("train", text_prompts("a", "b"))
        first, second = (await client.lease_groups("train", "p", 2)).leases
        epoch = (await client.rewind("train", 0)).epoch
        await client.put_groups([complete_put(first)])
        store.free = 1000
        with pytest.raises(ResourceExhausted, match="1000 bytes left, min_free_disk_bytes is 1048576") as refused:
            await client.put_groups([complete_put(second)])
        assert refused.value.retry_after_seconds == 5.0
        batch = await client.lease_batch("train", epoch, 0)
        assert await client.consume("train", epoch, 0, batch.digest) == 1
        assert await client.commit("train", epoch, 1) == 1
        store.free = 1 << 30
        await client.put_groups([complete_put(second)])


def may_mount() -> bool:
    return subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="this user may not mount a small disk")
def test_a_start_with_little_space_commits_and_frees_and_a_full_disk_says_its_path_and_the_way_out(
    tmp_path: Path,
) -> None:
    mount = f"mount -t tmpfs -o size=3m tmpfs {tmp_path} && exec {sys.executable} -m tests.support.full_disk {tmp_path}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "[info" not in line]
    assert said[0] == "committed"
    assert said[-1] == "whole"
    full = said[1:-1]
    assert full
    for message in full:
        assert "[Errno 28] the disk is full. Delete other files on it" in message
        assert str(tmp_path / "ledger") in message
