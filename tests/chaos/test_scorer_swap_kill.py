"""kill -9 of the reward service at each point of a swap: the state before or after the change, and every score once."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.client.reward import RewardClient
from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder
from headrace.score import Score, ScoreItem

_FUNCTIONS = """
def one(args, sample): return 1.0
"""
_GATED = """
import os, time
from pathlib import Path
gate = Path(__file__).with_suffix(".gate")
Path(__file__).with_suffix(".loading").touch()
while gate.exists(): time.sleep(0.01)

def two(args, sample): return 2.0
"""
_SECONDS = 120.0


class Service:
    """`python -m services.reward`, killed and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        words = ("--address", self.address, "--custom-rm-path", f"{self._folder}/f.py:one", "--reward-workers", "1")
        with (self._folder / "reward.log").open("a") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.reward", *words, "--folder", str(self._folder)),
                stdout=log,
                stderr=log,
            )

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    (tmp_path / "f.py").write_text(_FUNCTIONS)
    (tmp_path / "g.py").write_text(_GATED)
    service = Service(tmp_path)
    await service.start()
    yield service
    await service.kill()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(_SECONDS):
        while not is_so():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def scoring(client: RewardClient) -> AsyncIterator[list[set[float]]]:
    """Groups are scored all the time: each sample once, each group by one scorer."""
    groups: list[set[float]] = []

    async def score() -> None:
        while True:
            name = f"g{len(groups)}"
            items = [ScoreItem(f"{name}/{i}", "", "7", group_id=name) for i in range(8)]
            results = await client.score(items, deadline_seconds=_SECONDS)
            rewards = [result.value for result in results if isinstance(result, Score)]
            assert len(rewards) == len(items)
            groups.append(set(rewards))

    task = asyncio.create_task(score())
    try:
        yield groups
    finally:
        assert not task.done() or task.result() is None
        task.cancel()
    assert all(len(rewards) == 1 for rewards in groups)


async def test_every_change_is_made_once_and_no_score_is_lost_or_of_two_scorers(
    service: Service, tmp_path: Path
) -> None:
    name = f"{tmp_path}/g.py:two"
    async with RewardClient(service.address) as client, scoring(client) as groups:
        assert (await client.scorer_state()).changes == 0
        canary = pb.ChangeScorerRequest(canary=pb.Trial(scorer=name, share=1.0))
        await kill_at("while it loads", service, tmp_path, client, canary)
        state = await client.scorer_state()
        assert (state.candidate.scorer, state.live.scorer, state.changes) == (name, "", 1)
        await until(lambda: {2.0} in groups)

        await kill_at("once it is on disk", service, tmp_path, client, pb.ChangeScorerRequest(promote=pb.Promote()))
        state = await client.scorer_state()
        assert (state.live.scorer, state.HasField("candidate"), state.changes) == (name, False, 2)

        await kill_at("after its answer", service, tmp_path, client, pb.ChangeScorerRequest(rollback=pb.Rollback()))
        state = await client.scorer_state()
        assert (state.live.scorer, len(state.former), state.changes) == ("", 0, 3)
        number = len(groups)
        await until(lambda: len(groups) > number + 2)
        assert groups[-1] == {1.0}


async def kill_at(
    point: str, service: Service, folder: Path, client: RewardClient, request: pb.ChangeScorerRequest
) -> None:
    """Asks for the change, kills the service at the point, and lets the caller, which is not told, finish."""
    gate, state = folder / "g.gate", RunFolder(folder).scorer_state
    before = state.read_bytes() if state.exists() else b""
    (folder / "g.loading").unlink(missing_ok=True)
    if point == "while it loads":
        gate.touch()
    change = asyncio.create_task(client.change_scorer(request, deadline_seconds=_SECONDS))
    if point == "while it loads":
        await until((folder / "g.loading").exists)
    elif point == "once it is on disk":
        await until(lambda: state.exists() and state.read_bytes() != before)
    else:
        await change
    await service.kill()
    if point == "while it loads":
        assert not state.exists()
    gate.unlink(missing_ok=True)
    await service.start()
    await change
