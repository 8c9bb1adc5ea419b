"""Requests that never arrive, are packed, or are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.rpc import interceptor
from headrace.rpc.client import connect
from headrace.rpc.server import RpcServer, Service

NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
SLOW = f"/{NAME}/Score"


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


async def test_requests_that_never_arrive_hold_up_nobody_and_end(monkeypatch) -> None:
    monkeypatch.setattr(interceptor, "MAX_RECEIVE_SECONDS", 1.0)
    async with serving() as server, connect(server.address) as stranger, connect(server.address) as other:
        slow = [asyncio.ensure_future(stranger.stream_unary(SLOW, None, None)(never())) for _ in range(20)]
        while server.calls_in_progress < len(slow):  # another party's state
            await asyncio.sleep(0.01)
        stub = reward_pb2_grpc.RewardServiceStub(other)
        await stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=30)
        ends = await asyncio.gather(*slow, return_exceptions=True)
        assert {end.code() for end in ends} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert "did not arrive within 1 s" in ends[0].details()
        assert server.calls_in_progress == 0
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
