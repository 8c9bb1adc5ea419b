"""Lifelines over real connections: death, silence, goodbye."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from services.trainer.control import lifeline
from services.trainer.control.lifeline import Lifeline, PeerLost

SECRET = b"secret"
FOLLOWER = """
import asyncio, sys
from services.trainer.control.lifeline import Lifeline
async def follow():
    life = Lifeline(1, 2, b"secret")
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
    leader, follower = Lifeline(0, 2, SECRET), Lifeline(1, 2, SECRET)
    await follower.connect("127.0.0.1", await leader.listen("127.0.0.1"))
    lost = asyncio.create_task(leader.until_lost())
    finished = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.2)
        finished.set()

    await follower.close()
    await leader.guard(work())
    assert finished.is_set()
    assert not lost.done()
    lost.cancel()
    await leader.close()


async def test_strangers_cost_nothing_and_a_rank_that_is_missing_is_still_let_in() -> None:
    leader, follower = Lifeline(0, 2, SECRET), Lifeline(1, 2, SECRET)
    port = await leader.listen("127.0.0.1")
    guarding = asyncio.create_task(leader.guard(asyncio.Event().wait()))  # type: ignore[arg-type]  # never returns
    tls = bytes.fromhex("16030100c8010000c40303") + os.urandom(200)
    for words in (b"", b"\0\0\0\1", b"+" * 36, (1).to_bytes(4, "big") + bytes(32), tls, os.urandom(100_000)):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(words)
        writer.close()
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    await follower.connect("127.0.0.1", port)
    await until_refused(port)
    assert not guarding.done()
    for _, writer in idle:
        writer.close()
    await follower.close()
    guarding.cancel()
    await leader.close()


@pytest.mark.parametrize(("rank", "secret"), [(2, SECRET), (0, SECRET), (2**31, SECRET), (1, b"another")])
async def test_a_rank_that_is_not_of_this_run_is_hung_up_on(rank: int, secret: bytes) -> None:
    leader, other = Lifeline(0, 2, SECRET), Lifeline(rank, 2, secret)
    await other.connect("127.0.0.1", await leader.listen("127.0.0.1"))
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        async with asyncio.timeout(60):
            await other.until_lost()
    await leader.guard(asyncio.sleep(0))
    await leader.close()


async def test_a_second_rank_of_the_same_number_is_hung_up_on() -> None:
    leader, first, second = Lifeline(0, 3, SECRET), Lifeline(1, 3, SECRET), Lifeline(1, 3, SECRET)
    port = await leader.listen("127.0.0.1")
    await first.connect("127.0.0.1", port)
    await second.connect("127.0.0.1", port)
    async with asyncio.timeout(60):
        done, _ = await asyncio.wait(
            [asyncio.create_task(each.until_lost()) for each in (first, second)], return_when=asyncio.FIRST_COMPLETED
        )
    assert len(done) == 1
    assert isinstance(done.pop().exception(), PeerLost)
    await leader.guard(asyncio.sleep(0))
    for each in (first, second, leader):
        await each.close()


async def until_refused(port: int) -> None:
    """Nobody can connect once every rank is there."""
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.01)


async def started() -> tuple[Lifeline, subprocess.Popen[str]]:
    """Rank 0 here, rank 1 as a process that is connected."""
    leader = Lifeline(0, 2, SECRET)
    port = await leader.listen("127.0.0.1")
    process = subprocess.Popen([sys.executable, "-c", FOLLOWER, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "connected\n"
    await asyncio.sleep(0)
    return leader, process
