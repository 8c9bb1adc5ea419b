"""What an agent host does when its run ends, and which function the samples of its tasks name."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace import agent_host as agent_host
from headrace.agent_host import AgentHost
from headrace.hooks.agent import Task, run_agent
from headrace.hooks.args import HookArgs
from headrace.process.workers import WorkerPool, WorkerRaised
from headrace.run_folder import RunFolder, ServiceEntry
from tests.support.agent_hosts import lending

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

async def by_httpx(args, task, base_url):
    import httpx
    async with httpx.AsyncClient(base_url=base_url) as client:
        for turn in range(200):
            messages = [{"role": "user", "content": task.prompt}]
            reply = await client.post("/chat/completions", json={"model": "policy", "messages": messages})
            reply.raise_for_status()

async def of_parts(args, task, base_url):
    await once(task, base_url)
    return {"style": 0.25, "right": 2.0}

async def scored(args, task, base_url):
    await once(task, base_url)
    return 3.0

async def breaks(args, task, base_url):
    raise RuntimeError("no browser")

async def asks_nothing(args, task, base_url):
    return None

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


@pytest.mark.parametrize(
    ("function", "words", "playing"),
    [
        ("run", ("--concurrency", "2", "--workers", "1"), 2),  # all slots are taken, and more tasks wait
        ("by_httpx", ("--concurrency", "8"), 3),
        ("run", (), 0),  # idle
    ],
)
async def test_a_host_ends_with_its_run_in_order_and_says_so_in_a_few_lines(
    tmp_path: Path, function: str, words: tuple[str, ...], playing: int
) -> None:
    (tmp_path / "mine.py").write_text(PLAYS)
    stack = contextlib.AsyncExitStack()
    _, engine, _, address = await stack.enter_async_context(
        lending(tmp_path, num_prompts=3 if playing else 0, token_seconds=0.02)
    )
    keeper = await a_run(tmp_path, address)
    mine = ("--agent-function-path", f"{tmp_path / 'mine.py'}:{function}", *words)
    async with hosting(str(tmp_path / "run"), *mine) as process:
        assert process.stdout is not None
        said = await process.stdout.readline()
        async with asyncio.timeout(120):
            while engine.num_in_flight < playing:  # another party's state
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
        ("scored", "agent {path}:scored", None),
        ("of_parts", "agent {path}:of_parts", None),
        ("asks_nothing", "", "{path}:asks_nothing asked nothing of its base_url"),
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


@pytest.mark.parametrize("function", ["run", "by_httpx", "scored"])
async def test_an_agent_whose_endpoint_is_gone_fails_in_one_sentence(tmp_path: Path, function: str) -> None:
    (tmp_path / "mine.py").write_text(PLAYS)
    pool = WorkerPool(1)
    try:
        with pytest.raises(Exception, match="nothing listens at its base_url: the rollout service has ended") as raised:
            await pool.run(
                run_agent,
                f"{tmp_path / 'mine.py'}:{function}",
                HookArgs({}),
                Task("2 + 2?"),
                "http://127.0.0.1:9/sessions/x",
                timeout_seconds=60.0,
            )
    finally:
        await pool.close()
    assert isinstance(raised.value, WorkerRaised)
    assert raised.value.is_ours
