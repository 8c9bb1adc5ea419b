"""Channels over real connections: death, silence, goodbye, and strangers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from headrace.errors import DeadlineExceeded
from services.trainer.control import channel
from services.trainer.control.channel import Channel, PeerLost, introduce
from services.trainer.megatron.rendezvous import listener
from tests.support.processes.listening import listening

SECRET = b"secret"
FOLLOWER = """
import asyncio, sys
from services.trainer.control.channel import Channel
async def follow():
    life = Channel(1, 2, b"secret")
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
    monkeypatch.setattr(channel, "SILENT_SECONDS", 3.0)
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


async def test_after_goodbye_nobody_is_missed() -> None:
    leader, follower = Channel(0, 2, SECRET), Channel(1, 2, SECRET)
    await follower.connect("127.0.0.1", await leader.listen(listener("127.0.0.1")))
    finished = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.2)
        finished.set()

    await follower.close()
    await leader.guard(work())
    assert finished.is_set()
    await leader.guard(asyncio.sleep(0))
    await leader.close()


async def test_rank_zero_listens_at_the_host_that_was_named_and_at_no_other() -> None:
    before = listening([os.getpid()])
    leader = Channel(0, 2, SECRET)
    port = await leader.listen(listener("127.0.0.1"))
    assert listening([os.getpid()]).keys() - before.keys() == {f"127.0.0.1:{port}"}
    await leader.close()


async def test_strangers_cost_nothing_and_a_rank_that_is_missing_is_still_let_in() -> None:
    leader, follower = Channel(0, 2, SECRET), Channel(1, 2, SECRET)
    port = await leader.listen(listener("127.0.0.1"))
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
    leader, other = Channel(0, 2, SECRET), Channel(rank, 2, secret)
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        await other.connect("127.0.0.1", await leader.listen(listener("127.0.0.1")))
    await leader.guard(asyncio.sleep(0))
    await leader.close()


async def test_rank_zero_does_not_wait_for_ever_for_a_rank_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_CONNECT_SECONDS", 0.01)
    leader = Channel(0, 3, SECRET)
    await leader.listen(listener("127.0.0.1"))
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1, 2\] did not connect to rank 0 within 0.01 s"):
        await leader.until_complete()
    await leader.close()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x7f\xff\xff\xff", "it announced a frame of 2147483647 bytes"),
        (b'\0\0\0\4{"}\n', "type|MessagePack|Expected"),
        (b"\0\0\1\0half", "its connection closed"),
        (b"\0", "its connection closed"),
    ],
)
async def test_bytes_of_a_rank_that_are_no_message_are_its_loss(data: bytes, why: str) -> None:
    leader = Channel(0, 2, SECRET)
    reader, writer = await asyncio.open_connection("127.0.0.1", await leader.listen(listener("127.0.0.1")))
    await introduce(reader, writer, SECRET, 1)
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(60):
        with pytest.raises(PeerLost, match=f"rank 1 is gone .*({why})"):
            await leader.guard(asyncio.sleep(600))
    writer.close()
    await leader.close()


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


async def started() -> tuple[Channel, subprocess.Popen[str]]:
    """Rank 0 here, rank 1 as a process that is connected."""
    leader = Channel(0, 2, SECRET)
    port = await leader.listen(listener("127.0.0.1"))
    process = subprocess.Popen([sys.executable, "-c", FOLLOWER, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "connected\n"
    await asyncio.sleep(0)
    return leader, process
