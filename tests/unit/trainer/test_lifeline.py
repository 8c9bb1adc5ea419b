"""Lifelines over real connections: death, silence, goodbye."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from services.trainer import lifeline
from services.trainer.lifeline import Lifeline, PeerLost

FOLLOWER = """
import asyncio, sys
from services.trainer.lifeline import Lifeline
async def follow():
    life = Lifeline(1)
    await life.connect("127.0.0.1", int(sys.argv[1]))
    print("connected", flush=True)
    await life.guard(asyncio.sleep(600))
asyncio.run(follow())
"""


async def test_a_rank_that_is_killed_ends_the_others_work_at_once() -> None:
    leader, follower = await started()
    follower.kill()
    async with asyncio.timeout(60):
        with pytest.raises(PeerLost, match="rank 1 is gone .*(closed|reset)"):
            await leader.guard(asyncio.sleep(600))
    follower.wait()


async def test_a_rank_that_hangs_is_noticed_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "SILENT_SECONDS", 3.0)
    leader, follower = await started()
    follower.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(PeerLost, match="rank 1 is gone .it was silent for 3 s"):
                await leader.guard(asyncio.sleep(600))
    finally:
        follower.kill()
        follower.wait()


async def test_the_error_that_a_death_brings_is_told_as_the_death() -> None:
    leader, follower = await started()

    async def collective() -> None:
        os.kill(follower.pid, signal.SIGKILL)
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(PeerLost):
        await leader.guard(collective())
    follower.wait()


async def test_an_error_without_a_death_is_itself() -> None:
    leader, follower = await started()

    async def broken() -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        await leader.guard(broken())
    follower.kill()
    follower.wait()


async def test_after_goodbye_nobody_is_missed() -> None:
    leader, follower = Lifeline(0), Lifeline(1)
    await follower.connect("127.0.0.1", await leader.listen("127.0.0.1"))
    await follower.close()
    await leader.guard(asyncio.sleep(0.2))
    await leader.close()


async def started() -> tuple[Lifeline, subprocess.Popen[str]]:
    """Rank 0 here, rank 1 as a process that is connected."""
    leader = Lifeline(0)
    port = await leader.listen("127.0.0.1")
    process = subprocess.Popen([sys.executable, "-c", FOLLOWER, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "connected\n"
    await asyncio.sleep(0)
    return leader, process
