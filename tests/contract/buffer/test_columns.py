"""Large columns: out of line in the buffer, in line for whoever puts and fetches."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient, LargeColumn, taken_out
from headrace.errors import DataLoss, FailedPrecondition, HeadraceError, NotFound
from headrace.ledger_tools.backup import restore_backup, write_backup
from headrace.trajectory import Sample
from services.buffer.store.sqlite import SqliteStore
from services.buffer.verify import verify
from tests.support.ledgers.buffer_samples import completed_sample, text_prompts
from tests.support.processes.buffer_server import BufferProcess, served_buffer

STREAM = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=1)
MIB = 1 << 20
# `make chaos` asks for the 80 MiB that a sample of 32k tokens has.
LARGE = int(os.environ.get("HEADRACE_COLUMN_MIB", "8")) * MIB


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[BufferClient]:
    store = SqliteStore(tmp_path / "ledger")
    async with (
        served_buffer(store, columns_folder=tmp_path / "ledger" / "columns") as (_, server),
        BufferClient(server.address) as client,
    ):
        await client.create_stream(STREAM)
        yield client


def files(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "ledger" / "columns").iterdir()}


def with_experts(lease: pb.GroupLease, index: int, num_bytes: int, seed: int) -> Sample:
    """A sample with so many bytes of routed experts, alike for equal seeds."""
    experts = np.random.default_rng(seed).integers(0, 128, num_bytes // 2, np.int16)
    columns = {"hidden_states": experts.reshape(-1, 8, 4)}
    return dataclasses.replace(completed_sample(lease, index, 0), columns=columns)


def put_of(lease: pb.GroupLease, samples: list[Sample]) -> pb.GroupPut:
    packed = [sample.pack() for sample in samples]
    return pb.GroupPut(
        lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=packed
    )


async def put_one(client: BufferClient, name: str, seeds: tuple[int, int], num_bytes: int = 2 * MIB) -> pb.GroupPut:
    """A group of two samples whose columns have these seeds."""
    await client.submit_prompts("train", text_prompts(name))
    (lease,) = (await client.lease_groups("train", "p", 1)).leases
    put = put_of(lease, [with_experts(lease, i, num_bytes, seed) for i, seed in enumerate(seeds)])
    await client.put_groups([put])
    return put


async def become(folder: Path, num_files: int) -> None:
    """Waits for the thread that deletes: a commit is answered before the files are gone."""
    async with asyncio.timeout(60):
        while len(files(folder)) != num_files:
            await asyncio.sleep(0.01)


async def train(client: BufferClient, epoch: int, step: int) -> None:
    batch = await client.lease_batch("train", epoch, step, timeout_seconds=10)
    await client.consume("train", epoch, step, batch.digest)
    await client.commit("train", epoch, step + 1)


async def test_a_sample_comes_back_as_it_was_packed(client: BufferClient, tmp_path: Path) -> None:
    put = await put_one(client, "a", (1, 2))
    ids = [sample.envelope.sample_id for sample in put.samples]
    assert await client.fetch_samples("train", ids) == list(put.samples)
    (group,) = (await client.list_groups("train")).groups
    assert all(envelope.payload_bytes < 1000 for envelope in group.samples)
    named = {envelope.out_of_line[0].sha256.hex() for envelope in group.samples}
    assert named == files(tmp_path)


async def test_a_column_is_kept_once_and_deleted_with_the_last_sample_that_names_it(
    client: BufferClient, tmp_path: Path
) -> None:
    epoch = (await client.rewind("train", 0)).epoch
    await put_one(client, "a", (1, 2))
    await put_one(client, "b", (2, 3))
    assert len(files(tmp_path)) == 3
    await train(client, epoch, 0)
    await become(tmp_path, 2)
    put = await put_one(client, "c", (3, 3))
    await train(client, epoch, 1)
    assert await client.fetch_samples("train", [s.envelope.sample_id for s in put.samples]) == list(put.samples)
    await train(client, epoch, 2)
    await become(tmp_path, 0)


async def test_a_put_that_names_a_column_which_is_not_here_is_refused(client: BufferClient) -> None:
    await client.submit_prompts("train", text_prompts("a"))
    (lease,) = (await client.lease_groups("train", "p", 1)).leases
    put = put_of(lease, [with_experts(lease, i, 2 * MIB, i) for i in range(2)])
    slim = [taken_out(sample)[0] for sample in put.samples]
    del put.samples[:]
    put.samples.extend(slim)
    with pytest.raises(FailedPrecondition, match="call UploadColumn before the put"):
        await client.put_groups([put])


async def test_bytes_with_another_digest_are_refused(client: BufferClient, tmp_path: Path) -> None:
    with pytest.raises(DataLoss, match="the column's bytes have the SHA-256"):
        await client.upload_column(LargeColumn(hashlib.sha256(b"other").digest(), b"these" * 100))
    assert files(tmp_path) == set()
    unknown = pb.FetchColumnRequest(sha256=b"x" * 32)
    with pytest.raises(NotFound, match="never uploaded"):
        _ = [piece async for piece in client.stream_column(unknown, deadline_seconds=60)]


def damaged(ledger: Path, columns: Path) -> tuple[str, ...]:
    store = SqliteStore(ledger)
    found = verify(store, columns).damaged
    store.close()
    return found


async def test_a_backup_has_the_columns(client: BufferClient, tmp_path: Path) -> None:
    put = await put_one(client, "a", (1, 2))
    await write_backup(client.backup(), tmp_path / "copy")
    restore_backup(tmp_path / "copy", tmp_path / "again")
    assert not damaged(tmp_path / "again", tmp_path / "again" / "columns")
    assert [line.endswith("is missing") for line in damaged(tmp_path / "again", tmp_path)] == [True, True]
    store = SqliteStore(tmp_path / "again")
    async with (
        served_buffer(store, columns_folder=tmp_path / "again" / "columns") as (_, server),
        BufferClient(server.address) as restored,
    ):
        ids = [sample.envelope.sample_id for sample in put.samples]
        assert await restored.fetch_samples("train", ids) == list(put.samples)


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(MIB)
        opened.write(b"wrong")


HARMS = {"overwritten": overwrite, "cut": lambda file: os.truncate(file, MIB), "missing": Path.unlink}


async def fetched(client: BufferClient, sha256: bytes, offset: int = 0, num_bytes: int = 0) -> bytes | str:
    """The bytes as the wire has them, or the kind of the error."""
    request = pb.FetchColumnRequest(sha256=sha256, offset=offset, num_bytes=num_bytes)
    try:
        return b"".join([piece.data async for piece in client.stream_column(request, deadline_seconds=60)])
    except HeadraceError as error:
        return type(error).__name__


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("is_running", [False, True], ids=["before a start", "while it serves"])
async def test_a_damaged_column_is_named_never_served_and_healed_by_an_upload(
    tmp_path: Path, harm: str, is_running: bool
) -> None:
    columns = tmp_path / "ledger" / "columns"
    async with AsyncExitStack() as stack:

        async def start() -> BufferClient:
            await stack.aclose()
            store = SqliteStore(tmp_path / "ledger")
            _, server = await stack.enter_async_context(served_buffer(store, columns_folder=columns))
            return await stack.enter_async_context(BufferClient(server.address))

        client = await start()
        await client.create_stream(STREAM)
        put = await put_one(client, "a", (1, 2))
        data = {sha256: (columns / sha256.hex()).read_bytes() for sha256 in map(bytes.fromhex, files(tmp_path))}
        harmed = taken_out(put.samples[0])[1][0].sha256
        if not is_running:
            await stack.aclose()
        HARMS[harm](columns / harmed.hex())
        if not is_running:
            client = await start()
        assert await fetched(client, harmed) == "DataLoss"
        assert await fetched(client, harmed, MIB // 2, 1000) == "DataLoss"
        ids = [sample.envelope.sample_id for sample in put.samples]
        assert [(found.group_id, found.sample_id) for found in await client.damage()] == [(put.group_id, ids[0])]
        await client.upload_column(LargeColumn(harmed, data[harmed]))
        assert await client.damage() == []
        client = await start()
        assert await client.damage() == []
        assert [await fetched(client, sha256) for sha256 in data] == list(data.values())
        assert await client.fetch_samples("train", ids) == list(put.samples)


@pytest.mark.timeout(600)
async def test_four_large_columns_pass_through_little_memory_and_a_kill(tmp_path: Path) -> None:
    buffer = BufferProcess(tmp_path, None, constants=["services.buffer.__main__:MIN_FREE_DISK_BYTES=0"])
    await buffer.start()
    try:
        async with BufferClient(buffer.address, deadline_seconds=120) as client:
            await client.create_stream(pb.StreamConfig(name="big", n_samples_per_prompt=1, groups_per_step=4))
            await client.submit_prompts("big", text_prompts("a", "b", "c", "d"))
            leases = (await client.lease_groups("big", "p", 4)).leases
            before = buffer.peak_bytes
            killing = asyncio.create_task(kill_in_the_middle(buffer, tmp_path))
            digests = {}
            for i, lease in enumerate(leases):
                put = put_of(lease, [with_experts(lease, 0, LARGE, i)])
                await client.put_groups([put])
                digests[put.samples[0].envelope.sample_id] = put.samples[0].envelope.digest
            if not killing.done():  # it looked away while they passed
                killing.cancel()
                await buffer.kill()
                await buffer.start()
            for sample_id, digest in digests.items():
                (sample,) = await client.fetch_samples("big", [sample_id])
                assert sample.envelope.digest == digest
                assert Sample.unpack(sample).columns["hidden_states"].nbytes == LARGE
            grown = buffer.peak_bytes - before
            print(f"4 x {LARGE / MIB:.0f} MiB through a buffer: its memory grew by {grown / MIB:.0f} MiB")
            assert grown < 80 * MIB
    finally:
        await buffer.kill()


async def kill_in_the_middle(buffer: BufferProcess, folder: Path) -> None:
    """Once the second column is on its way."""
    columns = folder / "ledger" / "columns"
    while len(list(columns.iterdir())) < 2 or not list(columns.glob("*.part")):
        await asyncio.sleep(0.005)
    await buffer.kill()
    await buffer.start()


async def leased_with_partial(client: BufferClient, seed: int) -> pb.GroupLease:
    """Leases the one group and releases it with a partial sample that has a column of its own."""
    (lease,) = (await client.lease_groups("train", "p", 1)).leases
    partial = with_experts(lease, 0, 2 * MIB, seed).pack()
    await client.release_leases([pb.LeaseRelease(lease_id=lease.lease_id, partial_samples=[partial])])
    return lease


async def test_columns_of_a_deleted_stream_go_and_those_of_others_stay(client: BufferClient, tmp_path: Path) -> None:
    """READY, in a batch, CONSUMED and partial ones; one column is also another stream's."""
    other = pb.StreamConfig(name="other", n_samples_per_prompt=2, groups_per_step=1)
    await client.create_stream(other)
    await client.submit_prompts("other", text_prompts("a"))
    (lease,) = (await client.lease_groups("other", "p", 1)).leases
    kept = put_of(lease, [with_experts(lease, i, 2 * MIB, seed) for i, seed in enumerate((1, 77))])
    await client.put_groups([kept])
    epoch = (await client.rewind("train", 0)).epoch
    for name, seeds in (("a", (1, 2)), ("b", (3, 4)), ("c", (5, 6))):
        await put_one(client, name, seeds)
    batch = await client.lease_batch("train", epoch, 0, timeout_seconds=10)
    await client.consume("train", epoch, 0, batch.digest)
    await client.lease_batch("train", epoch, 1, timeout_seconds=10)
    await client.submit_prompts("train", text_prompts("d"))
    await leased_with_partial(client, 7)
    assert len(files(tmp_path)) == 8
    await client.delete_stream("train", force=True)
    await become(tmp_path, 2)
    ids = [sample.envelope.sample_id for sample in kept.samples]
    assert await client.fetch_samples("other", ids) == list(kept.samples)


async def test_payloads_of_a_deleted_stream_go_from_the_disk(tmp_path: Path) -> None:
    """Those of 1,200 groups, READY and with partial samples, over two starts."""
    store = SqliteStore(tmp_path)
    async with served_buffer(store) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(pb.StreamConfig(name="s", n_samples_per_prompt=1, groups_per_step=1))
        await client.submit_prompts("s", text_prompts(*(f"{i}" for i in range(1_200))))
        leases: list[pb.GroupLease] = []
        while len(leases) < 1_200:
            leases += (await client.lease_groups("s", "p", 600, request_id=f"{len(leases)}")).leases
        await client.put_groups([put_of(lease, [completed_sample(lease, 0, 0)]) for lease in leases[:900]])
        partials = [(lease, completed_sample(lease, 0, 0).pack()) for lease in leases[900:]]
        await client.release_leases([pb.LeaseRelease(lease_id=x.lease_id, partial_samples=[s]) for x, s in partials])
        await client.delete_stream("s", force=True)
    store = SqliteStore(tmp_path)
    async with served_buffer(store) as (buffer, _):
        async with asyncio.timeout(60):
            while buffer.ledger.leftovers:
                await asyncio.sleep(0.005)
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    counts = {table: database.execute(f"SELECT COUNT(*) FROM {table}").fetchone() for table in TABLES}
    database.close()
    assert counts == dict.fromkeys(TABLES, (0,))


TABLES = ("groups", "prompts", "samples", "payloads")
