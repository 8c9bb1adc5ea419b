"""Agents that are played elsewhere: processes that lease tasks of the rollout service, and that may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.agent_host import task_of
from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.authority import issue_client, issue_service
from headrace.client.buffer import BufferClient
from headrace.client.rollout import RolloutClient
from headrace.errors import ConfigError, FailedPrecondition, InvalidArgument
from headrace.job.schema.job import Job
from headrace.launch.specs import spec
from headrace.ledger_tools.audit_run import audit_ledger, described
from headrace.rpc.roles import Role
from headrace.rpc.tls import TlsFolder
from headrace.run_folder import RunFolder
from headrace.trajectory import Sample, Status
from services.rollout.agents.hosts import AgentHosts
from services.rollout.agents.lending import MAX_LOSSES, TaskLeases, TaskOffer
from services.rollout.agents.server import EndpointServer
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


def test_a_task_that_is_renewed_stays_with_its_host_for_as_long_as_it_may_be_played() -> None:
    lending, offer = TaskLeases(lease_seconds=10.0), TaskOffer(seconds=100.0, num_bytes=10, since=0.0)
    lending.offer(offer)
    (lease,) = lending.lend("h", 5, 100, now=0.0)
    for now in (9.0, 18.0, 27.0):
        assert lending.renew([lease.lease_id, "unknown"], now) == ["unknown"]
        assert not [*lending.lost(now + 9.9), *lending.overdue(now)]
    assert [*lending.overdue(100.1)] == [lease]
    assert lending.finish(lease.lease_id) is None
    assert not lending.waiting


def test_a_lost_or_returned_task_goes_first_and_large_ones_come_alone() -> None:
    lending = TaskLeases(lease_seconds=10.0)
    offers = [TaskOffer(seconds=100.0, num_bytes=size, since=0.0) for size in (40, 200, 40, 40)]
    for offer in offers:
        lending.offer(offer)
    (first,) = lending.lend("a", 5, 100, now=0.0)
    (large,) = lending.lend("a", 5, 100, now=0.0)
    assert [first.offer, large.offer] == offers[:2]
    assert lending.give_back(large.lease_id) is offers[1]
    assert [lease.host_id for lease in lending.lost(11.0)] == ["a"]
    assert list(lending.waiting) == [offers[0], offers[1], *offers[2:]]
    lending.withdraw(offers[0])
    lending.withdraw(offers[1])
    assert [lease.offer for lease in lending.lend("b", 5, 100, now=11.0)] == offers[2:]
    lending.withdraw(offers[2])
    assert lending.renew([first.lease_id, large.lease_id], 11.0) == [first.lease_id, large.lease_id]


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
    async with lending(tmp_path, num_prompts=0, agent_hosts=False) as (_, _, client, address):
        with pytest.raises(FailedPrecondition, match="--agent-hosts"):
            await client.lease_tasks("h", 1)
        async with host(address) as process:
            assert await process.wait() == 1


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


def test_the_endpoint_listens_for_other_machines_only_where_that_is_said() -> None:
    EndpointServer(None, host="127.0.0.1").require_private()
    openai_host = "10.1.2.3"
    server = EndpointServer(None, 8000, host=openai_host)
    assert server.url == "http://10.1.2.3:8000"
    with pytest.raises(ConfigError, match="pass --insecure"):
        server.require_private()


def test_insecure_lets_services_listen_for_other_machines(tmp_path: Path) -> None:
    job = Job.model_validate(
        {
            "model": {"hf_checkpoint": tmp_path},
            "services": {
                "buffer_address": "10.1.2.3:1",
                "reward_address": "10.1.2.3:2",
                "rollout_address": "10.1.2.3:3",
            },
        }
    )
    for is_given in (False, True):
        services = job.services.model_copy(update={"insecure": is_given})
        made = spec(job.model_copy(update={"services": services}), "rollout", RunFolder(tmp_path))
        assert ("--insecure" in made.command) is is_given


def test_options_of_hosts_need_an_agent(load_with: Any) -> None:
    with pytest.raises(ConfigError, match="agent_function_path"):
        load_with("--agent-hosts")
    assert load_with("--agent-function-path", "not/here.py:run", "--agent-hosts").rollout.agent_hosts
