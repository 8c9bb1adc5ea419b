"""Prompt files named by clients: regular files below the job's folder are read, and none of them stops the rest."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.job.schema.services import BufferSection
from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import BufferProcess, served_buffer
from tests.support.refusals import refused


def stream(name: str, path: Path | str) -> pb.StreamConfig:
    file = pb.FileSource(path=str(path), input_key="prompt", num_epochs=1)
    return pb.StreamConfig(name=name, n_samples_per_prompt=1, groups_per_step=2, files=[file])


def write_prompts(path: Path, count: int = 8) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem} {i}"}) + "\n" for i in range(count)))
    return path


@asynccontextmanager
async def buffer_at(tmp_path: Path) -> AsyncIterator[BufferClient]:
    """With `tmp_path`/prompts as the folder that clients may name files of."""
    (tmp_path / "prompts").mkdir(exist_ok=True)
    async with (
        served_buffer(SqliteStore(tmp_path / "ledger"), prompt_root=tmp_path / "prompts") as (_, server),
        BufferClient(server.address) as client,
    ):
        yield client


async def test_clients_name_files_below_the_jobs_folder_and_no_others(tmp_path: Path) -> None:
    async with buffer_at(tmp_path) as client:
        root = tmp_path / "prompts"
        secret = write_prompts(tmp_path / "secret.jsonl")
        write_prompts(root / "fine.jsonl")
        (root / "link.jsonl").symlink_to(secret)
        (root / "folder").mkdir()
        (root / "way-out").symlink_to(tmp_path)
        os.mkfifo(root / "pipe")
        refused: list[str | Path] = [
            secret, "../secret.jsonl", "../prompts/../secret.jsonl", "link.jsonl", "way-out/secret.jsonl", "folder",
            "", ".", "pipe", "pipe.parquet", "/dev/zero", "/dev/stdin", "/proc/self/environ", "/etc/passwd",
            "/nowhere/at/all", "a\0b", "x" * 5_000, root,
        ]  # fmt: skip
        async with asyncio.timeout(120):
            for path in refused:
                with pytest.raises(InvalidArgument) as caught:
                    await client.create_stream(stream("new", path))
                assert caught.value.field == "config.files.path", path
                assert "secret 0" not in caught.value.message
                assert "root:x:" not in caught.value.message
            for name, path in (
                ("whole", root / "fine.jsonl"),
                ("short", "fine.jsonl"),
                ("dots", "folder/../fine.jsonl"),
            ):
                await client.create_stream(stream(name, path))
                (lease,) = (await client.lease_groups(name, "p", 1)).leases
                assert lease.prompt.text == "fine 0"


async def test_without_a_folder_clients_name_no_files(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl")
    async with served_buffer(SqliteStore(tmp_path / "ledger")) as (_, server), BufferClient(server.address) as client:
        with refused(InvalidArgument, "--prompt-root", reason="PROMPT_FILE_REFUSED"):
            await client.create_stream(stream("new", path))


async def test_a_line_without_an_end_is_refused_and_not_read_into_memory(tmp_path: Path) -> None:
    async with buffer_at(tmp_path) as client:
        with (tmp_path / "prompts" / "zeros.jsonl").open("wb") as file:
            file.truncate(1 << 40)
        with refused(InvalidArgument, "line 1", reason="BAD_LINE"):
            await client.create_stream(stream("zeros", "zeros.jsonl"))


@pytest.mark.parametrize("harm", ["gone", "grown", "pipe"])
async def test_a_stream_in_trouble_is_alone_with_it_and_recovers(tmp_path: Path, harm: str) -> None:
    path, kept = tmp_path / "prompts" / "p.jsonl", tmp_path / "kept.jsonl"
    async with buffer_at(tmp_path) as client:
        write_prompts(path)
        await client.create_stream(stream("hurt", "p.jsonl"))
        epoch = (await client.rewind("hurt", 0)).epoch
        leases = (await client.lease_groups("hurt", "p", 3)).leases
        await client.put_groups([complete_put(lease) for lease in leases[:2]])
    path.rename(kept)
    if harm == "grown":
        path.write_bytes(kept.read_bytes() + b'{"prompt": "one more"}\n')
    elif harm == "pipe":
        os.mkfifo(path)
    elif harm == "folder":
        path.mkdir()
    elif harm == "other":
        write_prompts(path, 3)
    elif harm == "link":
        path.symlink_to(kept)
    async with asyncio.timeout(300), buffer_at(tmp_path) as client:
        with refused(FailedPrecondition, "hurt", reason="STREAM_IN_TROUBLE"):
            await client.lease_groups("hurt", "p", 1)
        stats = await client.stats("hurt")
        assert stats.trouble
        assert (stats.groups["READY"], stats.groups["LEASED"]) == (2, 1)
        # Others, and what is there already, are served.
        await client.create_stream(pb.StreamConfig(name="well", n_samples_per_prompt=1, groups_per_step=1))
        await client.submit_prompts("well", text_prompts("a"))
        assert len((await client.lease_groups("well", "p", 1)).leases) == 1
        batch = await client.lease_batch("hurt", epoch, 0)
        ids = [sample.sample_id for group in batch.groups for sample in group.samples]
        assert len(await client.fetch_samples("hurt", ids)) == 2
        assert await client.consume("hurt", epoch, 0, batch.digest) == 1
        assert await client.commit("hurt", epoch, 1) == 2
        with refused(FailedPrecondition, "hurt", reason="STREAM_IN_TROUBLE"):
            await client.lease_batch("hurt", epoch, 1)
        # The file is put back.
        path.rmdir() if harm == "folder" else path.unlink(missing_ok=True)
        kept.rename(path)
        while (await client.stats("hurt")).trouble:
            try:
                await client.lease_groups("hurt", "p", 1)
            except FailedPrecondition:
                await asyncio.sleep(0.1)
        assert {lease.prompt.text for lease in (await client.lease_groups("hurt", "q", 9)).leases} <= {
            f"p {i}" for i in range(3, 8)
        }


async def test_the_job_may_restart_over_a_pipe_and_a_signal_ends_it(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl")
    (tmp_path / "root").mkdir()
    process = BufferProcess(tmp_path, prompts, buffer=BufferSection(max_staleness=1, prompt_root=tmp_path / "root"))
    await process.start()
    try:
        async with asyncio.timeout(120), BufferClient(process.address) as client:
            assert len((await client.lease_groups("train", "p", 1)).leases) == 1
            await process.kill()
            prompts.unlink()
            os.mkfifo(prompts)
            os.mkfifo(tmp_path / "root" / "pipe")
            await process.start()
            for _ in range(8):
                with refused(FailedPrecondition, "p.jsonl", reason="STREAM_IN_TROUBLE"):
                    await client.lease_groups("train", "p", 1)
                with refused(InvalidArgument, "pipe", reason="PROMPT_FILE_REFUSED"):
                    await client.create_stream(stream("pipe", "pipe"))
            await client.create_stream(pb.StreamConfig(name="well", n_samples_per_prompt=1, groups_per_step=1))
            await client.submit_prompts("well", text_prompts("a"))
            leases = (await client.lease_groups("well", "p", 1)).leases
            await client.put_groups([complete_put(lease) for lease in leases])
            assert await process.terminate() == 0
    finally:
        await process.kill()
