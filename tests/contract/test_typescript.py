"""The TypeScript package of protos/typescript, in Node: built, type-checked, run with real services."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import __version__
from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.reward.v1 import reward_pb2
from headrace.cli.authority import issue_client, issue_service
from headrace.client.buffer import LARGE_COLUMN_BYTES, BufferClient
from headrace.conformance.checks import results
from headrace.conformance.reward import CHECKS, RewardSubject
from headrace.hooks import section_args
from headrace.job.schema.services import RewardSection
from headrace.rpc.access import Role, Tokens, add_token
from headrace.rpc.client import connect
from headrace.rpc.net import free_port
from headrace.rpc.server import Listen
from headrace.rpc.tls import TlsFolder
from headrace.trajectory import Sample
from services.buffer.store.memory import MemoryStore
from services.reward.server import RewardServer
from tests.support.ledgers.buffer_samples import complete_put, completed_sample, text_prompts
from tests.support.processes.buffer_server import ROOT, served_buffer

PACKAGE = ROOT / "protos" / "typescript"
EXAMPLE = ROOT / "examples" / "reward_typescript"
STREAM = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2, max_staleness=1)


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the package's test programs. `npm run build` generates, type-checks and compiles."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node.js is not installed, which the TypeScript package needs: apt-get install nodejs npm")
    for words in (["ci", "--no-audit", "--no-fund"],) * (not (PACKAGE / "node_modules").is_dir()) + (["run", "build"],):
        done = subprocess.run(["npm", *words], cwd=PACKAGE, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return PACKAGE / "dist" / "test"


async def run(program: Path, *words: str, folder: Path | None = None, **variables: str) -> tuple[int, str]:
    """Its exit code, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        "node", str(program), *words, stdout=asyncio.subprocess.PIPE, cwd=folder, env={**os.environ, **variables}
    )
    async with asyncio.timeout(180):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def played(programs: Path, *words: str, **variables: str) -> Any:
    code, output = await run(programs / "client.js", *words, folder=None, **variables)
    assert code == 0, output
    return json.loads(output)


async def refused(programs: Path, *words: str, **variables: str) -> dict[str, str]:
    code, output = await run(programs / "client.js", *words, folder=None, **variables)
    assert code == 1, output
    error: dict[str, str] = json.loads(output)
    return error


async def answer(client: BufferClient, num_groups: int) -> None:
    """A producer that answers so many groups."""
    while num_groups:
        leases = (await client.lease_groups("train", "fake", 8, wait_seconds=10)).leases
        if leases:
            await client.put_groups([complete_put(lease) for lease in leases])
        num_groups -= len(leases)


async def test_node_submits_prompts_and_reads_the_samples(programs: Path) -> None:
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(STREAM)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer(client, 3))
            asking = tasks.create_task(
                played(programs, "submit", server.address, "train", "What is 1+1?", "What is 2+2?", "é?")
            )
    seen = asking.result()
    assert seen["states"] == ["READY"] * 3
    assert sorted(s["group_id"] for s in seen["samples"]) == [f"train/{i}" for i in (0, 0, 1, 1, 2, 2)]
    tokens = sorted(s["columns"]["tokens"] for s in seen["samples"])
    assert tokens == [[5, 1, 2, 3, 10, 5]] * 3 + [[5, 1, 2, 3, 11, 5]] * 3
    assert {(s["reward"], s["policy_version"]) for s in seen["samples"]} == {(1.0, 0)}


async def test_a_sample_that_node_puts_is_read_by_python(programs: Path) -> None:
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(STREAM)
        (group,) = await client.submit_prompts("train", text_prompts("3 + 4"))
        assert await played(programs, "produce", server.address, "train") == {"renewed": 1, "refused": None, "ready": 1}
        (found,) = (await client.list_groups("train", group_ids=[group])).groups
        ids = [envelope.sample_id for envelope in found.samples]
        samples = [Sample.unpack(sample) for sample in await client.fetch_samples("train", ids)]
    assert [sample.tokens.tolist() for sample in samples] == [[1, 2, 3, 10, 5], [1, 2, 3, 11, 5]]
    assert [(sample.loss_mask.tolist(), sample.reward) for sample in samples] == [([1, 0], 1.0)] * 2
    assert [sample.rollout_log_probs.tolist() for sample in samples] == [[-0.5, 0.0]] * 2


async def test_node_reads_a_column_that_is_stored_out_of_line(programs: Path, tmp_path: Path) -> None:
    large = np.arange(LARGE_COLUMN_BYTES // 4 + 1, dtype=np.int32)
    async with (
        served_buffer(MemoryStore(), columns_folder=tmp_path) as (_, server),
        BufferClient(server.address) as client,
    ):
        await client.create_stream(STREAM)
        await client.submit_prompts("train", text_prompts("3 + 4"))
        (lease,) = (await client.lease_groups("train", "fake", 1)).leases
        samples = [completed_sample(lease, i, lease.policy_version) for i in range(lease.n_samples)]
        put = complete_put(lease)
        put.samples[0].CopyFrom(replace(samples[0], columns={"large": large}).pack())
        await client.put_groups([put])
        assert (await client.fetch_stored("train", [samples[0].sample_id]))[0].envelope.out_of_line
        (seen,) = await played(programs, "read", server.address, "train", samples[0].sample_id)
    assert seen["columns"]["large"] == [len(large), *range(8)]
    assert seen["columns"]["tokens"] == [5, 1, 2, 3, 10, 5]


async def test_node_scores_responses_with_its_certificate_and_its_token(programs: Path, tmp_path: Path) -> None:
    authority, tokens = tmp_path / "tls", tmp_path / "tokens.json"
    issue_service(authority, (), 30)
    guests = issue_client(authority, "guests", None, 30).folder
    token = add_token(tokens, "bob", Role.CONSUMER)
    section = RewardSection(reward_workers=1, rm_type="math")
    listen = Listen("127.0.0.1:0", tls=TlsFolder(authority), tokens=Tokens(tokens))
    server = await RewardServer.start(section, section_args(section), listen)
    try:
        words = ("score", server.rpc.address, "7", "\\boxed{7}", "\\boxed{8}")
        assert await played(programs, *words, HEADRACE_TLS_DIR=str(guests), HEADRACE_TOKEN=token) == [1, 0]
        error = await refused(programs, *words, HEADRACE_TLS_DIR=str(guests))
    finally:
        await server.stop(1)
    assert (error["status"], error["reason"]) == ("UNAUTHENTICATED", "UNAUTHENTICATED")


async def test_node_hears_the_servers_error(programs: Path) -> None:
    async with served_buffer(MemoryStore()) as (_, server):
        error = await refused(programs, "submit", server.address, "nowhere", "Hello?")
    assert (error["name"], error["status"], error["reason"]) == ("HeadraceError", "NOT_FOUND", "NOT_FOUND")
    assert "nowhere" in error["message"]


async def test_node_waits_for_a_service_that_is_being_restarted(programs: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    asked = asyncio.Event()

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        asked.set()

    ending = await asyncio.start_server(hang_up, "127.0.0.1", int(address.rpartition(":")[2]))
    asking = asyncio.create_task(played(programs, "streams", address))
    await asked.wait()
    ending.close()
    await ending.wait_closed()
    async with served_buffer(MemoryStore(), address=address):
        assert await asking == []


async def test_node_gives_up_at_the_deadline_and_names_the_service(programs: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    error = await refused(programs, "streams", address, "1")
    assert error["status"] == "UNAVAILABLE"
    assert f"the buffer at {address}" in error["message"]


@pytest.mark.parametrize("address", ["127.0.0.1", "buffer:7001,buffer:7002", "http://buffer:7001"])
async def test_an_address_that_is_not_host_and_port_is_refused(programs: Path, address: str) -> None:
    error = await refused(programs, "streams", address)
    assert error["name"] == "RangeError"
    assert address in error["message"]


async def test_a_token_is_not_sent_unencrypted_to_another_machine(programs: Path) -> None:
    error = await refused(programs, "streams", "buffer:7001", HEADRACE_TOKEN="secret-word")
    assert error["name"] == "RangeError"
    assert "secret-word" not in error["message"]


def test_the_package_has_the_version_of_headrace() -> None:
    version = json.loads((PACKAGE / "package.json").read_text())["version"]
    assert version.replace("-dev.", ".dev") == __version__


async def test_the_readme_of_the_package_is_a_program_that_runs(programs: Path, tmp_path: Path) -> None:
    readme = (PACKAGE / "README.md").read_text()
    assert readme.partition("```ts\n")[2].partition("```")[0] == (PACKAGE / "test" / "readme.ts").read_text()
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(STREAM)
        (tmp_path / "runs" / "run").mkdir(parents=True)
        services = {"buffer": {"address": server.address}}
        (tmp_path / "runs" / "run" / "services.json").write_text(json.dumps(services))
        code, output = await run(programs / "readme.js", folder=tmp_path)
    assert code == 0
    assert "QUEUED: 1n" in output


@asynccontextmanager
async def served_by_node(program: Path) -> AsyncIterator[str]:
    """The address that the program prints as its last word."""
    words = ("node", str(program), "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            yield (await process.stdout.readline()).decode().split()[-1]
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
def example(programs: Path, tmp_path: Path) -> Path:
    """The compiled server of the example, which has the package as `npm install` links it."""
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules", "*.js", "runs"))
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "headrace").symlink_to(PACKAGE)
    (folder / "node_modules" / "@types").symlink_to(PACKAGE / "node_modules" / "@types")
    compiler = str(PACKAGE / "node_modules" / ".bin" / "tsc")
    done = subprocess.run([compiler], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "server.js"


async def test_the_example_of_a_reward_service_in_typescript_keeps_every_promise(example: Path) -> None:
    item = reward_pb2.ScoreItem(item_id="0", prompt="3 + 4 =", response="7", label="7")
    async with served_by_node(example) as address, connect(address) as channel:
        subject = RewardSubject(channel, "", [item])
        assert [each async for each in results(CHECKS, subject) if each.broken] == []
        near = reward_pb2.ScoreItem(item_id="1", response="8", label="7")
        without = reward_pb2.ScoreItem(item_id="2", response="8")
        scored, failed = await subject.score([near, without])
    assert (scored.score.value, scored.score.scorer, scored.score.scorer_version) == (0.5, "close", "1")
    assert failed.error.reason == "SCORER_RAISED"
