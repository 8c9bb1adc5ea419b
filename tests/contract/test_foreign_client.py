"""A client in another language, from nothing but protos/: Node submits, a Python producer answers, Node reads."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import complete_put
from tests.support.processes.buffer_server import ROOT, served_buffer

FOLDER = Path(__file__).parent / "node"


@pytest.fixture(scope="session")
def node() -> str:
    """The interpreter, its packages installed as package-lock.json names them."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        pytest.skip("Node.js is not installed, which the client in JavaScript needs: apt-get install nodejs npm")
    if not (FOLDER / "node_modules").is_dir():
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=FOLDER, check=True, timeout=120)
    return found


async def answer(client: BufferClient, num_groups: int) -> None:
    """A producer that answers so many groups."""
    while num_groups:
        leases = (await client.lease_groups("train", "fake", 8, wait_seconds=10)).leases
        await client.put_groups([complete_put(lease) for lease in leases])
        num_groups -= len(leases)


async def run(node: str, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        node,
        str(FOLDER / "client.js"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_node_submits_prompts_and_reads_the_samples(node: str) -> None:
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(
            pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2, max_staleness=1)
        )
        async with asyncio.timeout(180), asyncio.TaskGroup() as tasks:
            tasks.create_task(answer(client, 3))
            asking = tasks.create_task(
                run(node, server.address, str(ROOT / "protos"), "train", "What is 1+1?", "What is 2+2?", "é?")
            )
        status, output, errors = asking.result()
    assert status == 0, errors
    seen = json.loads(output)
    assert seen["states"] == ["GROUP_STATE_READY"] * 3
    assert sorted(s["group_id"] for s in seen["samples"]) == [f"train/{i}" for i in (0, 0, 1, 1, 2, 2)]
    assert sorted(s["tokens"] for s in seen["samples"]) == [[1, 2, 3, 10, 5]] * 3 + [[1, 2, 3, 11, 5]] * 3
    assert {(s["reward"], s["policy_version"]) for s in seen["samples"]} == {(1.0, 0)}


async def test_node_hears_the_servers_error(node: str) -> None:
    async with served_buffer(MemoryStore()) as (_, server):
        status, _, errors = await run(node, server.address, str(ROOT / "protos"), "nowhere", "Hello?")
    assert status == 1
    assert "5 NOT_FOUND: there is no stream 'nowhere'" in errors
