"""Channels over real connections: death, silence, goodbye, and strangers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.cli.authority import issue_service
from headrace.errors import DeadlineExceeded
from headrace.rpc.tls import TlsFolder
from services.trainer.control import channel
from services.trainer.control.channel import Channel, Order, PeerLost, introduce
from services.trainer.megatron.rendezvous import listener

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


async def test_after_goodbye_nobody_is_missed() -> None:
    leader, follower = Channel(0, 2, SECRET), Channel(1, 2, SECRET)
    await follower.connect("127.0.0.1", await leader.listen(listener("127.0.0.1")))
    await follower.close()
    await leader.guard(asyncio.sleep(0.2))
    await leader.close()


async def test_strangers_cost_nothing_and_a_rank_that_is_missing_is_still_let_in() -> None:
    leader, follower = Channel(0, 2, SECRET), Channel(1, 2, SECRET)
    port = await leader.listen(listener("127.0.0.1"))
    guarding = asyncio.create_task(leader.guard(asyncio.Event().wait()))  # type: ignore[arg-type]  # never returns
    for words in (b"", b"\0\0\0\1", b"+" * 36, (1).to_bytes(4, "big") + bytes(32), os.urandom(100_000)):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(words)
        writer.close()
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    await follower.connect("127.0.0.1", port)
    await leader.until_complete()
    assert not guarding.done()
    for _, writer in idle:
        writer.close()
    await follower.close()
    guarding.cancel()
    await leader.close()


@pytest.mark.parametrize(("rank", "secret"), [(2, SECRET), (0, SECRET), (1, b"another")])
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


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TlsFolder:
    return certificates(tmp_path_factory.mktemp("ours"))


def certificates(folder: Path) -> TlsFolder:
    issue_service(folder, [], 1)
    return TlsFolder(folder)


async def test_ranks_with_the_runs_certificates_hear_orders_of_any_size_and_others_are_not_let_in(
    ours: TlsFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are they followed. Whoever has none of the certificates knows the secret all the same."""
    monkeypatch.setattr(channel, "_CONNECT_SECONDS", 1.0)
    theirs = certificates(tmp_path / "theirs")
    leader, follower, other = Channel(0, 2, SECRET, ours), Channel(1, 2, SECRET, ours), Channel(0, 2, SECRET, theirs)
    port = await leader.listen(listener("127.0.0.1"))
    for tls in (theirs, None):
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            await Channel(1, 2, SECRET, tls).connect("127.0.0.1", port)
    with pytest.raises(PeerLost, match="CERTIFICATE_VERIFY_FAILED"):
        await Channel(1, 2, SECRET, ours).connect("127.0.0.1", await other.listen(listener("127.0.0.1")))
    await follower.connect("127.0.0.1", port)
    await leader.until_complete()
    arguments = msgspec.Raw(msgspec.msgpack.encode("x" * 5_000_000))
    leader.send(Order(7, "export", arguments, True))
    order = await follower.next_order()
    assert (order.number, bytes(order.arguments)) == (7, bytes(arguments))
    for each in (follower, leader, other):
        await each.close()


async def started() -> tuple[Channel, subprocess.Popen[str]]:
    """Rank 0 here, rank 1 as a process that is connected."""
    leader = Channel(0, 2, SECRET)
    port = await leader.listen(listener("127.0.0.1"))
    process = subprocess.Popen([sys.executable, "-c", FOLLOWER, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "connected\n"
    await asyncio.sleep(0)
    return leader, process
