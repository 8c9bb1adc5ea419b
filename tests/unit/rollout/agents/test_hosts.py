"""Agents that are played elsewhere: processes that lease tasks of the rollout service, and that may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from headrace import agent_host
from headrace.agent_host import AgentHost, task_of
from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.authority import issue_client, issue_service
from headrace.client.buffer import BufferClient
from headrace.client.rollout import RolloutClient
from headrace.errors import ConfigError, FailedPrecondition, InvalidArgument, Unavailable
from headrace.hooks.agent import Task, run_agent
from headrace.hooks.args import HookArgs
from headrace.ledger_tools.audit_run import audit_ledger, described
from headrace.rpc.access import Role
from headrace.rpc.tls import TlsFolder
from headrace.run_folder import RunFolder, ServiceEntry
from headrace.trajectory import Sample, Status
from services.rollout.agents.hosts import MAX_LOSSES, AgentHosts, HostTask, TaskLeases
from services.trainer.data.buffer import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.agent_hosts import LEASE_SECONDS, host, lending
from tests.support.agents import AGENT, GROUPS, SAMPLES, Producing, require_as_sampled


def run_out_leases(made: Producing) -> None:
    """As if no host had been heard of for longer than a lease."""
    hosts = made.sampler.player
    assert isinstance(hosts, AgentHosts)
    hosts._look(time.monotonic() + LEASE_SECONDS + 1.0)


async def lease_one(client: RolloutClient, host_id: str = "h") -> pb.AgentTask:
    (task,) = (await client.lease_tasks(host_id, 1, wait_seconds=60.0)).tasks
    return task


async def ask(task: pb.AgentTask) -> str:
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key="none", max_retries=0) as agent:
        messages = [{"role": "user", "content": task.text}]
        made = await agent.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        return made.choices[0].message.content or ""


async def test_a_host_that_is_killed_loses_no_sample_and_none_is_trained_twice(tmp_path: Path) -> None:
    async with lending(tmp_path, token_seconds=0.1) as (made, engine, _, address):
        async with host(address, "--concurrency", "6") as first:
            async with asyncio.timeout(120):
                while engine.num_in_flight < 6:  # another party's state
                    await asyncio.sleep(0.01)
            os.kill(first.pid, signal.SIGKILL)
            await first.wait()
        run_out_leases(made)
        engine.token_seconds = 0.0
        async with host(address) as second:
            samples = await made.produced()
            record = tmp_path / "training.jsonl"
            await train_one_step(made.buffer, record)
            found = await audit_ledger(made.buffer_address, "train", record, 60.0, deep=True)
            second.send_signal(signal.SIGTERM)
            said, _ = await second.communicate()
    assert found.verdict.is_clean, described(found)
    assert len(samples) == GROUPS * SAMPLES
    for sample in samples:
        require_as_sampled(sample)
        assert (sample.failure, sample.reward, int(sample.loss_mask.sum())) == (None, 5.0, 12)
    assert b"plays" in said
    assert b"stopped after" in said
    assert second.returncode == 0


async def train_one_step(buffer: BufferClient, record: Path) -> None:
    epoch = (await buffer.rewind("train", 0)).epoch
    reply = await buffer.lease_batch("train", epoch, 0)
    batch = Batch.of(reply)
    await buffer.fetch_samples("train", [sample.sample_id for sample in batch.samples])
    TrainingRecord(record).append(0, batch)
    await buffer.consume("train", epoch, 0, reply.digest)
    await buffer.commit("train", epoch, 1)


async def test_what_a_host_says_in_a_lease_that_has_ended_counts_for_nothing(tmp_path: Path) -> None:
    async with lending(tmp_path, num_prompts=0) as (made, _, client, _):
        playing = asyncio.create_task(made.play())
        lost = await lease_one(client, "frozen")
        await ask(lost)
        run_out_leases(made)
        task = await lease_one(client, "second")
        assert await client.renew_tasks("frozen", [lost.lease_id]) == [lost.lease_id]
        with pytest.raises(openai.NotFoundError, match="another host plays it"):
            await ask(lost)
        said = await ask(task)
        assert not await client.finish_task(pb.FinishTaskRequest(lease_id=lost.lease_id, reward=9.0))
        assert await client.finish_task(pb.FinishTaskRequest(lease_id=task.lease_id, reward=2.0))
        assert not await client.finish_task(pb.FinishTaskRequest(lease_id=task.lease_id, reward=3.0))
        (sample,) = await playing
    require_as_sampled(sample)
    assert (sample.reward, sample.response, int(sample.loss_mask.sum())) == (2.0, said, 6)


def offered(prompt_characters: int = 0) -> HostTask:
    """A task of some 4 KiB and its prompt, which one host may play for 100 s."""
    task, missing = Task("x" * prompt_characters), cast(Any, None)
    return HostTask(task, missing, "g/1/0", "agent.run", missing, seconds=100.0, since=0.0)


def test_a_task_that_is_renewed_stays_with_its_host_for_as_long_as_it_may_be_played() -> None:
    leases, task = TaskLeases(lease_seconds=10.0), offered()
    leases.offer(task)
    assert leases.lend("h", 5, 1 << 20, now=0.0) == [task]
    lease_id = str(task.lease_id)
    for now in (9.0, 18.0, 27.0):
        assert leases.renew([lease_id, "unknown"], now) == ["unknown"]
        assert not [*leases.lost(now + 9.9), *leases.overdue(now)]
    assert [*leases.overdue(100.1)] == [task]
    assert leases.finish(lease_id) is None
    assert not leases.waiting


def test_a_lost_or_returned_task_goes_first_and_large_ones_come_alone() -> None:
    leases = TaskLeases(lease_seconds=10.0)
    tasks = [offered(characters) for characters in (0, 20_000, 0, 0)]
    for task in tasks:
        leases.offer(task)
    assert [*leases.lend("a", 5, 10_000, now=0.0), *leases.lend("a", 5, 10_000, now=0.0)] == tasks[:2]
    ids = [str(task.lease_id) for task in tasks[:2]]
    assert leases.give_back(ids[1]) is tasks[1]
    assert [task.host_id for task in leases.lost(11.0)] == ["a"]
    assert list(leases.waiting) == tasks
    leases.withdraw(tasks[0])
    leases.withdraw(tasks[1])
    assert leases.lend("b", 5, 10_000, now=11.0) == tasks[2:]
    leases.withdraw(tasks[2])
    assert leases.renew(ids, 11.0) == ids


async def test_a_task_that_ends_its_hosts_fails_and_one_that_is_returned_does_not(tmp_path: Path) -> None:
    async with lending(tmp_path, num_prompts=0, lease_seconds=0.2) as (made, _, client, _):
        playing = asyncio.create_task(made.play())
        for _ in range(MAX_LOSSES + 1):
            task = await lease_one(client)
            assert await client.finish_task(pb.FinishTaskRequest(lease_id=task.lease_id, returned=True))
        for number in range(MAX_LOSSES):
            await lease_one(client, f"host {number}")
        (sample,) = await playing
    assert sample.failure is not None
    assert (sample.status, sample.failure.reason) == (Status.FAILED, "HOOK_CRASHED")
    assert "3 agent hosts were not heard of again" in sample.failure.message


async def finished(made: Producing, client: RolloutClient, **result: Any) -> Sample:
    """What comes of a task that a host asked once and ended so."""
    playing = asyncio.create_task(made.play())
    task = await lease_one(client)
    await ask(task)
    await client.finish_task(pb.FinishTaskRequest(lease_id=task.lease_id, **result))
    (sample,) = await playing
    return sample


async def test_with_certificates_agents_that_know_nothing_of_them_play_over_https(tmp_path: Path) -> None:
    issue_service(tmp_path / "tls", (), 30)
    producer = issue_client(tmp_path / "tls", "p", Role.PRODUCER, 30).folder
    code = AGENT.replace("async with", "assert base_url.startswith('https://')\n    async with", 1)
    async with (
        lending(tmp_path, num_prompts=0, code=code, tls=TlsFolder(tmp_path / "tls")) as (made, _, _, address),
        host(address, tls_dir=producer),
    ):
        (sample,) = await made.play()
    assert sample.failure is None
    require_as_sampled(sample)


async def test_rewards_and_failures_are_those_that_the_host_says(tmp_path: Path) -> None:
    async with lending(tmp_path, num_prompts=0) as (made, _, client, _):
        failed = await finished(made, client, failure=sample_pb2.Failure(reason="HOOK_RAISED", message="no browser"))
        for wrong in ({"reward": float("nan")}, {"reward_parts_json": "[1]"}, {"failure": sample_pb2.Failure()}):
            with pytest.raises(InvalidArgument):
                await client.finish_task(pb.FinishTaskRequest(lease_id="x", **wrong))  # type: ignore[arg-type]
        assert await finished(made, client, reward=0.5)
    assert failed.failure is not None
    assert (failed.failure.reason, failed.failure.message) == ("HOOK_RAISED", "no browser")


async def test_a_task_brings_prompt_label_metadata_and_the_jobs_options(tmp_path: Path) -> None:
    async with lending(tmp_path, num_prompts=0) as (made, _, client, _):
        playing = asyncio.create_task(made.play(metadata={"level": 3}))
        reply = await client.lease_tasks("h", 5, wait_seconds=60.0, return_args=True)
        assert (reply.lease_seconds, reply.agent_function_path) == (LEASE_SECONDS, f"{tmp_path / 'agent.py'}:run")
        assert '"rollout_max_response_len":6' in reply.args_json
        task = task_of(reply.tasks[0])
        assert (task.prompt, task.label, task.metadata, task.evaluation) == ("2 + 2?", "4", {"level": 3}, False)
        await client.finish_task(pb.FinishTaskRequest(lease_id=reply.tasks[0].lease_id))
        (sample,) = await playing
    assert sample.failure is not None
    assert "asked nothing of its base_url" in sample.failure.message


async def test_a_job_without_hosts_lends_nothing_and_says_how(tmp_path: Path) -> None:
    async with lending(tmp_path, num_prompts=0, agent_hosts=False) as (_, _, client, _):
        with pytest.raises(FailedPrecondition, match="--agent-hosts"):
            await client.lease_tasks("h", 1)


async def test_tasks_without_any_host_fail_after_the_wait_for_peers(tmp_path: Path) -> None:
    async with lending(tmp_path, num_prompts=0) as (made, _, client, _):
        hosts = made.sampler.player
        assert isinstance(hosts, AgentHosts)
        hosts._patience_seconds = 0.5
        (sample,) = await made.play()
        warnings = list((await client.get_fleet()).warnings)
    assert sample.failure is not None
    assert sample.failure.reason == "UNAVAILABLE"
    assert "no agent host has asked for tasks" in sample.failure.message
    assert warnings == []  # those come after ten seconds


def test_options_of_hosts_need_an_agent(load_with: Any) -> None:
    with pytest.raises(ConfigError, match="agent_function_path"):
        load_with("--agent-hosts")
    assert load_with("--agent-function-path", "not/here.py:run", "--agent-hosts").rollout.agent_hosts


ENDS_SECONDS = 120.0
PLAYS = """
import asyncio
import openai

async def run(args, task, base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": task.prompt}]
        for turn in range(200):
            await client.chat.completions.create(model="policy", messages=messages)
    return 1.0

async def of_parts(args, task, base_url):
    await once(task, base_url)
    return {"style": 0.25, "right": 2.0}

async def breaks(args, task, base_url):
    raise RuntimeError("no browser")

async def once(task, base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        messages = [{"role": "user", "content": task.prompt}]
        await client.chat.completions.create(model="policy", messages=messages)
"""


@contextlib.asynccontextmanager
async def hosting(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`headrace agent` whose output and log are one stream."""
    command = (sys.executable, "-m", "headrace.cli.main", "agent", *words)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def a_run(folder: Path, address: str) -> asyncio.subprocess.Process:
    """A run whose rollout service is at the address; it lives as long as the process."""
    keeper = await asyncio.create_subprocess_exec("sleep", "1000")
    run = RunFolder(folder / "run")
    run.path.mkdir()
    run.write_services({"rollout": ServiceEntry(address, None, keeper.pid)})
    return keeper


async def test_a_host_ends_with_its_run_in_order_and_says_so_in_a_few_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLAYS)
    stack = contextlib.AsyncExitStack()
    _, engine, _, address = await stack.enter_async_context(lending(tmp_path, num_prompts=3, token_seconds=0.02))
    keeper = await a_run(tmp_path, address)
    mine = ("--agent-function-path", f"{tmp_path / 'mine.py'}:run", "--concurrency", "2", "--workers", "1")
    async with hosting(str(tmp_path / "run"), *mine) as process:
        assert process.stdout is not None
        said = await process.stdout.readline()
        async with asyncio.timeout(120):
            while engine.num_in_flight < 2:  # another party's state
                await asyncio.sleep(0.01)
        keeper.kill()
        await keeper.wait()
        await stack.aclose()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDS_SECONDS):
                said += await process.stdout.read()
                await process.wait()
        assert process.returncode == 0, f"{ENDS_SECONDS:g} s after its run had ended: exit code {process.returncode}"
    assert b"Traceback" not in said, said.decode()
    assert len(said) < 4_000, said.decode()
    assert b"has ended: stopped after" in said


async def test_a_host_of_an_address_waits_a_little_for_a_service_that_said_goodbye(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_host, "_RESTART_SECONDS", 0.0, raising=False)
    told: list[str] = []
    stack = contextlib.AsyncExitStack()
    _, _, client, _ = await stack.enter_async_context(lending(tmp_path, num_prompts=0))
    host = AgentHost(client, None, concurrency=1, workers=1, patience_seconds=300.0, tell=told.append)
    client.close = _nothing  # type: ignore[method-assign]  # the host's own, here
    running = asyncio.create_task(host.run())
    async with asyncio.timeout(120):
        while not told:
            await asyncio.sleep(0.01)
    await stack.aclose()
    async with asyncio.timeout(120):
        assert await running
    assert "the rollout service ends: this host waits 0 s" in told[1]


async def _nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("function", "scorer", "failure"),
    [
        ("of_parts", "agent {path}:of_parts", None),
        ("breaks", "", "agent {path}:breaks raised RuntimeError: no browser"),
    ],
)
async def test_samples_name_the_function_that_the_host_has_played(
    tmp_path: Path, function: str, scorer: str, failure: str | None
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLAYS)
    async with lending(tmp_path, num_prompts=0, agent_function_path="nowhere.jobs_own") as (made, _, _, address):
        made.sampler._args = type(made.sampler._args)({**made.sampler._args, "reward_key": "right"})
        async with hosting("--rollout-address", address, "--agent-function-path", f"{path}:{function}"):
            (sample,) = await made.play()
    assert sample.scorer == scorer.format(path=path)
    assert (sample.failure.message if sample.failure else None, failure) == (None, None) or (
        sample.failure is not None and str(failure).format(path=path) in sample.failure.message
    )


async def test_an_agent_whose_endpoint_is_gone_fails_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLAYS)
    agent = f"{tmp_path / 'mine.py'}:run"
    with pytest.raises(Unavailable, match="nothing listens at its base_url: the rollout service has ended"):
        await run_agent(agent, HookArgs({}), Task("2 + 2?"), "http://127.0.0.1:9/sessions/x")
