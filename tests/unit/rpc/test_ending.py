"""A server that ends answers the calls that it cannot finish, and says that they may be made again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.api.trainer.v1 import trainer_pb2_grpc
from headrace.client.trainer import TrainerClient
from headrace.rpc.net import free_port
from headrace.rpc.server import RpcServer, Service

NAME = pb.DESCRIPTOR.services_by_name["TrainerService"].full_name


class Slow(trainer_pb2_grpc.TrainerServiceServicer):
    """Pause never ends, Resume when it may; WatchProgress has two rows of step 3, the second once it is asked again."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.may_end = asyncio.Event()

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        self.begun.put_nowait("pause")
        await asyncio.Event().wait()
        raise AssertionError

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        self.begun.put_nowait("resume")
        await self.may_end.wait()
        return pb.ResumeResponse()

    async def WatchProgress(self, request: pb.WatchProgressRequest, context: Any) -> AsyncIterator[Any]:
        for step in (2, 3, 3, 4)[: self.num_rows]:
            if step >= request.from_step:
                yield pb.WatchProgressResponse(step=step)
        self.begun.put_nowait("watch")
        if self.num_rows < 4:
            await asyncio.Event().wait()


@asynccontextmanager
async def serving(address: str, num_rows: int = 0) -> AsyncIterator[tuple[Slow, RpcServer]]:
    slow = Slow(num_rows)
    add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    server = RpcServer("slow", address, [Service(slow, add, NAME)], waiting=["Pause", "WatchProgress"])
    await server.start()
    try:
        yield slow, server
    finally:
        await server.stop(0.0)


async def test_calls_that_wait_end_at_once_and_others_may_finish() -> None:
    async with serving("127.0.0.1:0") as (slow, server), grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
        waiting, working = stub.Pause(pb.PauseRequest()), stub.Resume(pb.ResumeRequest())
        assert {await slow.begun.get(), await slow.begun.get()} == {"pause", "resume"}
        stopping = asyncio.create_task(server.stop(30.0))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await waiting
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "ask again" in (ended.value.details() or "")
        assert not stopping.done()
        slow.may_end.set()
        assert await working == pb.ResumeResponse()
        await stopping


async def test_a_call_that_does_not_finish_in_the_grace_is_told_to_ask_again() -> None:
    async with serving("127.0.0.1:0") as (slow, server), grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
        call = stub.Resume(pb.ResumeRequest())
        await slow.begun.get()
        await server.stop(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_client_makes_a_call_again_at_the_next_server_and_a_watch_goes_on_with_the_next_row() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with TrainerClient(address) as client:
        steps: list[int] = []

        async def watch() -> None:
            steps.extend([row.step async for row in client.watch_progress()])

        async with asyncio.TaskGroup() as tasks:
            async with serving(address, num_rows=2) as (slow, _):
                watching = tasks.create_task(watch())
                assert await slow.begun.get() == "watch"
                resuming = tasks.create_task(client.resume())
                assert await slow.begun.get() == "resume"
            async with serving(address, num_rows=4) as (again, _):
                again.may_end.set()
                await resuming
                await watching
    assert steps == [2, 3, 3, 4]
