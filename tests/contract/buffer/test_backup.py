"""A ledger's copy while it serves, a ledger of that copy, and its samples as a table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow.parquet
import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.main import main
from headrace.client.buffer import BufferClient
from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import served_buffer

STREAM = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2)


@dataclass
class Served:
    address: str
    client: BufferClient
    folder: Path


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A buffer with ten groups ready and one step consumed."""
    folder = tmp_path / "ledger"
    async with (
        served_buffer(SqliteStore(folder, large_call_bytes=1)) as (_, server),
        BufferClient(server.address) as client,
    ):
        await client.create_stream(STREAM)
        await produce(client, 12)
        epoch = (await client.rewind("train", 0)).epoch
        batch = await client.lease_batch("train", epoch, 0)
        await client.consume("train", epoch, 0, batch.digest)
        yield Served(server.address, client, folder)


async def produce(client: BufferClient, count: int, prefix: str = "q") -> list[str]:
    """Sample ids that were acknowledged."""
    await client.submit_prompts("train", text_prompts(*(f"{prefix}{i}" for i in range(count))))
    leases = (await client.lease_groups("train", "p", count)).leases
    puts = [complete_put(lease) for lease in leases]
    await client.put_groups(puts)
    return [sample.envelope.sample_id for put in puts for sample in put.samples]


async def command(*words: str) -> int:
    return await asyncio.to_thread(main, ["buffer", *words])


async def test_a_copy_made_under_load_is_one_moment_of_the_ledger(served: Served, tmp_path: Path) -> None:
    before = await served.client.list_groups("train")
    stopping = asyncio.Event()

    async def keep_producing() -> None:
        rounds = 0
        while not stopping.is_set():
            await produce(served.client, 4, f"more-{rounds}-")
            rounds += 1

    producing = asyncio.create_task(keep_producing())
    assert await command("backup", served.address, str(tmp_path / "copy")) == 0
    stopping.set()
    await producing
    assert not list(served.folder.glob("copy-*"))
    assert await command("restore", str(tmp_path / "copy"), str(tmp_path / "again")) == 0

    restored = SqliteStore(tmp_path / "again")
    async with served_buffer(restored) as (buffer, server), BufferClient(server.address) as client:
        position = await client.position()
        assert position >= before.groups[0].position
        groups = {g.group_id: g for g in (await client.list_groups("train", page_size=1000)).groups}
        for group in before.groups:
            assert groups[group.group_id] == group
        ids = [sample.sample_id for group in groups.values() for sample in group.samples]
        assert len(await client.fetch_samples("train", ids)) == len(ids)
        events = [event.position async for page in _until(buffer.events.watch(1), position) for event in page]
        assert events == list(range(1, position + 1))
        await produce(client, 2, "goes on")


async def _until(pages, position):  # type: ignore[no-untyped-def]
    async for page in pages:
        yield page
        if page[-1].position >= position:
            return


async def test_a_changed_byte_of_a_backup_is_found(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("backup", served.address, str(tmp_path / "copy")) == 0
    assert await command("backup", served.address, str(tmp_path / "copy")) == 1
    assert "is not empty: name a new folder" in capsys.readouterr().err
    file = max((tmp_path / "copy" / "files").rglob("*.sqlite"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert await command("restore", str(tmp_path / "copy"), str(tmp_path / "again")) == 1
    assert "is not what was backed up" in capsys.readouterr().err
    (tmp_path / "copy" / "backup.json").unlink()
    assert await command("restore", str(tmp_path / "copy"), str(tmp_path / "again")) == 1
    assert "it is no backup, or one that was cut short" in capsys.readouterr().err


@pytest.mark.parametrize("manifest", ["", '{"store": 3}', '{"store": "sqlite", "position": 1, "files": [3]}'])
async def test_a_manifest_that_is_damaged_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], manifest: str
) -> None:
    (tmp_path / "backup.json").write_text(manifest)
    assert await command("restore", str(tmp_path), str(tmp_path / "ledger")) == 1
    assert "backup.json is not as `headrace buffer backup` wrote it" in capsys.readouterr().err


async def test_a_backup_of_a_damaged_ledger_says_what_it_lacks(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (group,) = (await served.client.list_groups("train", [pb.GROUP_STATE_READY], page_size=1)).groups
    (sample, _) = await served.client.fetch_samples("train", [one.sample_id for one in group.samples])
    file = next(path for path in (served.folder / "payloads").iterdir() if sample.payload in path.read_bytes())
    data = file.read_bytes()
    at = data.index(sample.payload)
    with file.open("r+b") as broken:
        broken.seek(at)
        broken.write(bytes([data[at] ^ 1]))
    assert await command("backup", served.address, str(tmp_path / "copy")) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "lacks 1 records or payloads that are damaged in the ledger itself; it holds all others" in said
    assert sample.envelope.sample_id in said
    assert not list(tmp_path.glob("copy-verified-*"))


async def test_samples_are_exported_as_a_table(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "samples.parquet"
    epoch = (await served.client.stats("train")).epoch
    await served.client.commit("train", epoch, 1)
    assert await command("export", "--buffer-address", served.address, "--parquet", str(file)) == 0
    rows = {row["sample_id"]: row for row in pyarrow.parquet.read_table(file).to_pylist()}
    groups = (await served.client.list_groups("train")).groups
    assert rows.keys() == {sample.sample_id for group in groups for sample in group.samples}
    ready = [row for row in rows.values() if row["state"] == "READY"]
    assert len(ready) == 20
    for row in ready:
        assert row["tokens"] == [1, 2, 3, 10 + row["index"], 5]
        assert (row["loss_mask"], row["rollout_log_probs"]) == ([1, 1], [0.0, 0.0])
        assert row["policy_ranges"] == [{"policy_version": 0, "start": 0, "end": 2}]
        assert row["prompt"].startswith("What is q")
    gone = [row for row in rows.values() if row["state"] == "COMMITTED"]
    assert [(row["step"], row["tokens"], row["reward"]) for row in gone] == [(0, None, 1.0)] * 4
    table = duckdb.sql(f"SELECT state, count(*), avg(reward), sum(len(tokens)) FROM '{file}' GROUP BY 1 ORDER BY 1")
    assert table.fetchall() == [("COMMITTED", 4, 1.0, None), ("READY", 20, 1.0, 100)]
