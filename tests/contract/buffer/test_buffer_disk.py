"""A disk that fails ends the buffer with one line, one that is full makes it wait; nothing answered is lost."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import DiskFull, ResourceExhausted
from headrace.job.schema.services import BufferSection
from headrace.protobuf import Payload
from services.buffer.ledger.group import Group
from services.buffer.store.payload_files import DiskFiles
from services.buffer.store.sqlite import SqliteStore, connect
from tests.support.faults.durable_points import image
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import BufferProcess, served_buffer


def process(folder: Path) -> BufferProcess:
    return BufferProcess(folder, None, buffer=BufferSection(max_staleness=9))


@pytest.mark.parametrize("failpoint", ["sync:EIO:2", "written:kill:2"])
async def test_a_disk_that_fails_ends_the_process_and_clients_go_on_after_its_restart(
    tmp_path: Path, failpoint: str
) -> None:
    buffer = process(tmp_path)
    await buffer.start(failpoint, 1)
    try:
        async with BufferClient(buffer.address) as client, asyncio.timeout(180):
            working = asyncio.create_task(work(client))
            assert await buffer.wait() == (-9 if "kill" in failpoint else 1)
            if "kill" not in failpoint:
                assert "Errno" in buffer.log.splitlines()[-1]
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


class FullFiles(DiskFiles):
    """Of a disk that takes half of a write and then no more, while `is_full`."""

    is_full = False

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        if self.is_full:
            whole = b"".join(parts)
            super().write(name, [whole[: len(whole) // 2]])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(name, parts)


class DiskUnderTest:
    """A store whose disk is full at will: for its payloads, or for SQLite's pages."""

    def __init__(self, folder: Path) -> None:
        self.store = SqliteStore(folder, large_call_bytes=1, open_files=self._files, connect_writer=self._connect)

    def set_full(self, where: str, *, is_full: bool) -> None:
        if where == "payloads":
            self.files.is_full = is_full
        else:
            (num_pages,) = self.writer.execute("PRAGMA page_count").fetchone()
            self.writer.execute(f"PRAGMA max_page_count = {num_pages if is_full else 1 << 30}")

    def _files(self, folder: Path) -> FullFiles:
        self.files = FullFiles(folder)
        return self.files

    def _connect(self, path: Path) -> sqlite3.Connection:
        self.writer = connect(path)
        return self.writer


@pytest.mark.parametrize("where", ["payloads", "rows"])
async def test_on_a_full_disk_callers_hear_the_way_out_and_the_buffer_goes_on_when_there_is_space(
    tmp_path: Path, where: str
) -> None:
    disk = DiskUnderTest(tmp_path)
    async with (
        asyncio.timeout(120),
        served_buffer(disk.store) as (buffer, server),
        BufferClient(server.address) as client,
        BufferClient(server.address, deadline_seconds=1.0) as hasty,
    ):
        await client.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=1))
        await client.submit_prompts("train", text_prompts("a", "b"))
        first, second = (await client.lease_groups("train", "p", 2)).leases
        puts = [complete_put(first), complete_put(second)]
        await client.put_groups(puts[:1])
        durable = whole(tmp_path)
        disk.set_full(where, is_full=True)
        many = text_prompts(*(f"c{i}" for i in range(500)))  # which need pages of their own
        waiting = asyncio.ensure_future(
            client.put_groups(puts[1:]) if where == "payloads" else client.submit_prompts("train", many)
        )
        while not disk.store.waiting_for:
            await asyncio.sleep(0.01)
        with pytest.raises(DiskFull, match="the disk is full. Delete other files on it") as refused:
            await hasty.lease_groups("train", "q", 1)
        assert str(tmp_path) in refused.value.message
        assert not waiting.done()
        assert whole(tmp_path) == durable
        disk.set_full(where, is_full=False)
        await waiting
        await client.put_groups(puts[1:])
        held = {s.envelope.sample_id: s.envelope.digest for s in await client.fetch_samples("train", sample_ids(puts))}
        assert held == {s.envelope.sample_id: s.envelope.digest for put in puts for s in put.samples}
        in_memory = {group.group_id: group for group in buffer.ledger.stream("train").groups.values()}
        assert in_memory == whole(tmp_path)
    store = SqliteStore(tmp_path)
    assert {group.group_id: group for group in store.load().groups} == in_memory
    assert not store.damage()
    store.close()


def sample_ids(puts: Sequence[pb.GroupPut]) -> list[str]:
    return [sample.envelope.sample_id for put in puts for sample in put.samples]


def whole(folder: Path) -> dict[str, Group]:
    """Every group as the disk has it."""
    with tempfile.TemporaryDirectory() as scratch:
        store = SqliteStore(image(folder, Path(scratch) / "ledger"))
        groups = {group.group_id: group for group in store.load().groups}
        store.close()
    return groups
