"""What one peer may have of a server: calls, requests on their way, bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.errors import ResourceExhausted
from headrace.rpc import interceptor
from headrace.rpc.access.caller import Caller
from headrace.rpc.access.roles import Role
from headrace.rpc.client import connect
from headrace.rpc.peers.calls import PeerBytes, PeerCalls, key_of
from headrace.rpc.server import RpcServer, Service

NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
SLOW = f"/{NAME}/Score"
BOB, SERVICE = Caller("bob", (Role.PRODUCER,)), Caller("headrace", (Role.SERVICE,))


def test_a_peer_is_a_name_or_a_host_and_here_a_connection() -> None:
    assert key_of("ipv4:10.0.0.1:5", BOB) == key_of("ipv4:10.0.0.2:6", BOB) == "producer bob"
    assert key_of("ipv4:10.0.0.1:5", None) == key_of("ipv4:10.0.0.1:6", None) == "ipv4:10.0.0.1"
    assert key_of("ipv6:[fe80::1]:5", None) == "ipv6:[fe80::1]"
    assert key_of("ipv4:10.0.0.1:5", Caller("nobody", ())) == "ipv4:10.0.0.1"
    for peer in ("ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:5", "ipv6:[::1]:5"):
        assert key_of(peer, None) == peer, "a stranger shares no limit with the run's own services"


def test_too_many_calls_and_bytes_are_refused_and_others_are_not() -> None:
    calls = PeerCalls(max_calls=2, max_bytes=100)
    with calls.one_of("a", BOB) as first, calls.one_of("a", BOB) as second:
        with pytest.raises(ResourceExhausted, match="a has 2 calls in progress, the most that one peer may have"):
            calls.one_of("a", BOB).__enter__()
        with calls.one_of("b", BOB) as other:
            other.received(100)
        first.received(60)
        with pytest.raises(ResourceExhausted, match="have 120 bytes, may have 100: send fewer of them at once"):
            second.received(60)
        assert calls.in_progress == 2
    assert calls.in_progress == 0
    with calls.one_of("a", BOB) as later:
        later.received(100)
    with calls.one_of("s", SERVICE) as own:
        own.received(10_000)


def test_bytes_that_come_one_after_the_other_count_until_the_end() -> None:
    held = PeerBytes(100)
    with held.held("a") as request:
        request.add(60)
        with pytest.raises(ResourceExhausted), held.held("a") as other:
            other.add(50)
        request.add(40)
    with held.held("a") as later:
        later.add(100)


class Scored(reward_pb2_grpc.RewardServiceServicer):
    async def Score(self, request, context):
        return reward_pb2.ScoreResponse()

    async def ListScorers(self, request, context):
        return reward_pb2.ListScorersResponse()


@asynccontextmanager
async def serving() -> AsyncIterator[RpcServer]:
    servicer = Service(Scored(), reward_pb2_grpc.add_RewardServiceServicer_to_server, NAME)
    server = RpcServer("test", "127.0.0.1:0", [servicer])
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def never() -> AsyncIterator[bytes]:
    await asyncio.get_running_loop().create_future()
    yield b""


async def test_requests_that_never_arrive_hold_up_their_sender_alone_and_end(monkeypatch) -> None:
    monkeypatch.setattr(interceptor, "MAX_RECEIVE_SECONDS", 1.0)
    async with serving() as server, connect(server.address) as stranger, connect(server.address) as other:
        slow = [asyncio.ensure_future(stranger.stream_unary(SLOW, None, None)(never())) for _ in range(20)]
        while server.peers.in_progress < len(slow):  # another party's state
            await asyncio.sleep(0.01)
        stub = reward_pb2_grpc.RewardServiceStub(other)
        await stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=30)
        ends = await asyncio.gather(*slow, return_exceptions=True)
        assert {end.code() for end in ends} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert "did not arrive within 1 s" in ends[0].details()
        assert server.peers.in_progress == 0
        await reward_pb2_grpc.RewardServiceStub(stranger).ListScorers(reward_pb2.ListScorersRequest(), timeout=30)


async def test_a_packed_request_is_refused_unopened() -> None:
    async with serving() as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary(SLOW, None, None)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(bytes(1 << 20), compression=grpc.Compression.Gzip, timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"", metadata=(("x", "y" * 20_000),), timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await call(b"", timeout=30)


async def test_a_call_without_a_request_says_so() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    async with serving() as server, connect(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="ended without a request") as refused:
            await channel.stream_unary(SLOW, None, None)(nothing(), timeout=30)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
