"""Between machines, ranks meet with the run's certificates: whoever has none of them is not let in, nor followed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from headrace.cli.authority import issue_service
from headrace.rpc.tls import TlsFolder
from services.trainer.control import channel
from services.trainer.control.channel import Channel, Order, PeerLost
from services.trainer.megatron.rendezvous import listener

SECRET = b"secret"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TlsFolder:
    return certificates(tmp_path_factory.mktemp("ours"))


def certificates(folder: Path) -> TlsFolder:
    issue_service(folder, [], 1)
    return TlsFolder(folder)


@asynccontextmanager
async def leader_of(tls: TlsFolder | None) -> AsyncIterator[tuple[Channel, int]]:
    leader = Channel(0, 2, SECRET, tls)
    port = await leader.listen(listener("127.0.0.1"))
    yield leader, port
    await leader.close()


async def test_ranks_with_the_runs_certificates_hear_orders_of_any_size(ours: TlsFolder) -> None:
    async with leader_of(ours) as (leader, port):
        follower = Channel(1, 2, SECRET, ours)
        await follower.connect("127.0.0.1", port)
        await leader.until_complete()
        arguments = msgspec.Raw(msgspec.msgpack.encode("x" * 5_000_000))
        leader.send(Order(7, "export", arguments, True))
        order = await follower.next_order()
        assert (order.number, bytes(order.arguments)) == (7, bytes(arguments))
        await follower.close()
        await leader.guard(asyncio.sleep(0))


@pytest.mark.parametrize("strangers", ["of another authority", "none"])
async def test_a_rank_that_knows_the_secret_is_not_let_in_without_the_runs_certificates(
    ours: TlsFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strangers: str
) -> None:
    monkeypatch.setattr(channel, "_CONNECT_SECONDS", 1.0)
    tls = None if strangers == "none" else certificates(tmp_path / "theirs")
    async with leader_of(ours) as (leader, port):
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            await Channel(1, 2, SECRET, tls).connect("127.0.0.1", port)
        follower = Channel(1, 2, SECRET, ours)
        await follower.connect("127.0.0.1", port)
        await leader.until_complete()
        await follower.close()


async def test_a_rank_zero_without_the_runs_certificates_is_not_followed(ours: TlsFolder, tmp_path: Path) -> None:
    async with leader_of(certificates(tmp_path / "theirs")) as (_, port):
        with pytest.raises(PeerLost, match="CERTIFICATE_VERIFY_FAILED"):
            await Channel(1, 2, SECRET, ours).connect("127.0.0.1", port)
