"""Agents that know nothing of headrace but a URL: their samples through the real producer, router and buffer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.errors import ConfigError
from headrace.rpc.net import free_port
from headrace.rpc.tracing import GENERATE
from headrace.run_folder import RunFolder
from headrace.traces import by_trace, read_spans
from headrace.trajectory import Status
from services.rollout.agents.sampler import WorkerPlayer
from tests.support.agents import AGENT, GROUPS, SAMPLES, Producing, require_as_sampled
from tests.support.agents import producing as producing_with
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.tracing import traced


@contextlib.asynccontextmanager
async def producing(
    folder: Path, code: str, *, token_seconds: float = 0.0, **options: Any
) -> AsyncIterator[tuple[Producing, FakeEngine]]:
    engine = FakeEngine(WIRE, token_seconds=token_seconds)
    async with producing_with(folder, code, lambda job: lambda number: engine, **options) as made:
        yield made, engine


async def test_an_agents_runs_become_the_batch_of_a_step(tmp_path: Path) -> None:
    async with producing(tmp_path, AGENT) as (made, _):
        samples = await made.produced()
    assert len(samples) == GROUPS * SAMPLES
    for sample in samples:
        require_as_sampled(sample)
        assert (sample.reward, sample.status, int(sample.loss_mask.sum())) == (5.0, Status.TRUNCATED, 12)
        assert 0 in sample.loss_mask  # the question between the answers
        assert sample.scorer.startswith("agent ")
        assert [one.policy_version for one in sample.policy_ranges] == [0, 0]


async def test_a_trace_has_each_turn_of_an_agent_and_what_it_did_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with traced(monkeypatch, tmp_path / "run") as begin:
        begin(process="rollout")
        async with producing(tmp_path, AGENT, num_prompts=0) as (made, _):
            await made.play(2)
    traces = by_trace(read_spans(RunFolder(tmp_path / "run")))
    assert len(traces) == 2
    for sample, *parts in traces.values():
        assert [sample.name, *(part.name for part in parts)] == ["rl.sample", GENERATE, "rl.environment", GENERATE]
        assert {part.parent_id for part in parts} == {sample.span_id}
        assert {part.attributes["gen_ai.usage.output_tokens"] for part in parts[::2]} == {6}
        assert {part.service for part in parts[::2]} == {"engine 0"}


async def test_a_worker_that_is_killed_costs_no_sample(tmp_path: Path) -> None:
    async with producing(tmp_path, AGENT, token_seconds=0.1) as (made, engine):
        async with asyncio.timeout(120):
            while not engine.num_in_flight:  # another party's state
                await asyncio.sleep(0.01)
        assert isinstance(made.sampler.player, WorkerPlayer)
        for pid in made.sampler.player._function.pool.pids:
            os.kill(pid, signal.SIGKILL)
        engine.token_seconds = 0.0
        samples = await made.produced()
        stats = await made.buffer.stats("train")
    assert len(samples) == GROUPS * SAMPLES
    for sample in samples:
        require_as_sampled(sample)
    assert (stats.groups["QUEUED"], stats.groups["LEASED"], stats.groups["FAILED"]) == (0, 0, 0)


async def test_a_conversation_apart_is_a_sample_of_the_same_rollout(tmp_path: Path) -> None:
    code = AGENT.replace(
        "        return float",
        '        judge = [{"role": "user", "content": "judge"}]\n'
        '        await client.chat.completions.create(model="policy", messages=judge)\n'
        "        return float",
    )
    async with producing(tmp_path, code, num_prompts=0) as (made, _):
        samples = await made.play(2)
    assert [sample.sample_id for sample in samples] == ["g/1/0/0", "g/1/0/1", "g/1/1/0", "g/1/1/1"]
    assert [sample.rollout_id for sample in samples] == ["g/1/0", "g/1/0", "g/1/1", "g/1/1"]
    assert {sample.reward for sample in samples} == {5.0}
    for sample in samples:
        require_as_sampled(sample)


ROLES = """
import openai
from headrace.hooks import as_role


async def run(args, task, base_url):
    text, returned = "3 + 4 =", {returned}
    for role in ("proposer", "solver", "proposer"):
        async with openai.AsyncOpenAI(base_url=as_role(base_url, role), api_key="none") as client:
            made = await client.completions.create(model="policy", prompt=text)
            text += made.choices[0].text + " So"
    return returned
"""


async def test_each_of_several_agents_of_a_task_has_samples_and_a_reward_of_its_own(tmp_path: Path) -> None:
    code = ROLES.replace("{returned}", '{"proposer": 0.25, "solver": 1.0}')
    async with producing(tmp_path, code, num_prompts=0) as (made, _):
        samples = await made.play(1)
    assert [(sample.sample_id, sample.tags, sample.reward) for sample in samples] == [
        ("g/1/0/proposer", {"role": "proposer"}, 0.25),
        ("g/1/0/solver", {"role": "solver"}, 1.0),
    ]
    assert {sample.rollout_id for sample in samples} == {"g/1/0"}
    for sample in samples:
        require_as_sampled(sample)
    proposer, solver = samples
    assert proposer.loss_mask.tolist().count(1) == 2 * solver.loss_mask.tolist().count(1)


async def test_a_role_without_a_reward_fails_the_sample(tmp_path: Path) -> None:
    async with producing(tmp_path, ROLES.replace("{returned}", '{"solver": 1.0}'), num_prompts=0) as (made, _):
        (sample,) = await made.play(1)
    assert sample.failure is not None
    assert (sample.status, sample.failure.reason) == (Status.FAILED, "INVALID_ARGUMENT")
    assert "proposer" in sample.failure.message


async def test_each_failure_is_the_samples_own(tmp_path: Path) -> None:
    code = AGENT.replace(
        "    async with",
        "    if task.index == 0:\n        raise KeyError('lost')\n"
        "    if task.index == 1:\n        return 1.0\n"
        "    if task.index == 2:\n        await asyncio.Event().wait()\n"
        "    async with",
    )
    async with producing(tmp_path, code, num_prompts=0, generate_timeout_seconds=20.0) as (made, _):
        samples = await made.play(4)
    reasons = [sample.failure.reason if sample.failure else None for sample in samples]
    assert reasons == ["HOOK_RAISED", "HOOK_INCOMPLETE", "HOOK_TIMEOUT", None]
    assert samples[0].failure is not None
    assert "KeyError: 'lost'" in samples[0].failure.message


async def test_an_agent_that_reaches_its_last_turn_keeps_what_it_said(tmp_path: Path) -> None:
    async with producing(tmp_path, AGENT, num_prompts=0, max_turns=1) as (made, _):
        (sample,) = await made.play()
    assert (sample.status, int(sample.loss_mask.sum()), sample.reward) == (Status.TRUNCATED, 6, None)
    require_as_sampled(sample)


async def test_a_reward_of_parts_is_the_part_that_is_trained_on(tmp_path: Path) -> None:
    code = AGENT.replace("return float(len(messages))", "return {'right': 1, 'short': 0.5}")
    async with producing(tmp_path, code, num_prompts=0) as (made, _):
        (sample,) = await made.play()
    assert sample.failure is not None  # no --reward-key
    assert "choose one with --reward-key" in sample.failure.message


async def test_openai_port_is_where_anybody_on_the_machine_asks(tmp_path: Path) -> None:
    port = free_port()
    async with (
        producing(tmp_path, AGENT, num_prompts=0, openai_port=port, agent_function_path=None),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any") as client,
    ):
        made = await client.completions.create(model="policy", prompt="once", max_tokens=5)
    assert made.usage is not None
    assert made.usage.completion_tokens == 5


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", 0))
        taker.listen()
        port = taker.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--openai-port {port}: .*: choose other"):
            async with producing(tmp_path, AGENT, num_prompts=0, openai_port=port):
                pass
