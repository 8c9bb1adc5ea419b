"""Answers that take for ever to grade: they are wrong, and hold up nobody."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.client.reward import RewardClient
from headrace.hooks import section_args
from headrace.job.schema.services import RewardSection
from headrace.rpc.server import Listen
from headrace.score import ScoreItem
from services.reward.server import RewardServer

# Sympy looks for the integral for minutes, in Python, once the label is one too.
SLOW = r"\boxed{\int e^{x^{x}} \sin(x^{90}) dx}"
NUM_BOMBS = int(os.environ.get("HEADRACE_BOMBS", "2"))


@asynccontextmanager
async def serving(num_clients: int, **leaves: object) -> AsyncIterator[list[RewardClient]]:
    section = RewardSection(**{"reward_workers": 2, "rm_type": "math", **leaves})
    server = await RewardServer.start(section, section_args(section), Listen("127.0.0.1:0"))
    clients = [RewardClient(server.rpc.address) for _ in range(num_clients)]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()
        await server.stop(1)


def items(*responses: str, label: str = "x^2") -> list[ScoreItem]:
    return [ScoreItem(str(i), "", response, label=label) for i, response in enumerate(responses)]


async def test_answers_that_cannot_be_graded_are_wrong_and_hold_up_nobody() -> None:
    """`HEADRACE_BOMBS=100 pytest -s` prints how long others wait meanwhile."""
    async with serving(2) as (attacker, other):
        # Several at once: the libraries are loaded in every worker.
        await other.score(items(*[f"x+{n}" for n in range(8)]), deadline_seconds=120)
        bombs = [
            asyncio.create_task(
                attacker.score(items(SLOW.replace("90", str(90 + n)), label=r"\int x dx"), deadline_seconds=3600)
            )
            for n in range(NUM_BOMBS)
        ]
        seconds = []
        while any(not bomb.done() for bomb in bombs):
            started = time.monotonic()
            right, wrong = await other.score(items(r"\boxed{x\cdot x}", "3"), deadline_seconds=120)
            seconds.append(time.monotonic() - started)
            assert (right.value, wrong.value) == (1.0, 0.0)
            await asyncio.sleep(0)
        seconds.sort()
        p50, p99 = (seconds[len(seconds) * percent // 100] for percent in (50, 99))
        print(f"{len(seconds)} answers of others, p50 {p50:.3f} s, p99 {p99:.3f} s")
        scores = [score for bomb in bombs for score in await bomb]
    assert [score.value for score in scores] == [0.0] * NUM_BOMBS
    assert len(seconds) > 1, "others are graded while the bombs are"
