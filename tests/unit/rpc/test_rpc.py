"""A server and a client over loopback: errors, limits, health, drain."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.client.buffer import BufferClient
from headrace.client.reward import RewardClient
from headrace.client.rollout import RolloutClient
from headrace.client.trainer import TrainerClient
from headrace.errors import (
    ConfigError,
    DeadlineExceeded,
    DiskFull,
    Fenced,
    HeadraceError,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    error_classes,
)
from headrace.rpc import interceptor
from headrace.rpc.client import call, connect
from headrace.rpc.log import configure_logging, cygrpc, log
from headrace.rpc.net import free_port
from headrace.rpc.server import RpcServer, Service

NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name


class Scripted(reward_pb2_grpc.RewardServiceServicer):
    """Raises what it is told to."""

    def __init__(self) -> None:
        self.called_at: list[float] = []
        self.error: Exception | None = None
        self.seconds = 0.0
        self.entered = asyncio.Event()

    async def ListScorers(self, request, context):
        self.called_at.append(time.monotonic())
        self.entered.set()
        await asyncio.sleep(self.seconds)
        if self.error:
            raise self.error
        return reward_pb2.ListScorersResponse()


@pytest.fixture
def servicer() -> Scripted:
    return Scripted()


@pytest.fixture
async def server(servicer: Scripted) -> AsyncIterator[RpcServer]:
    server = RpcServer(
        "test", "127.0.0.1:0", [Service(servicer, reward_pb2_grpc.add_RewardServiceServicer_to_server, NAME)]
    )
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def stub(server: RpcServer) -> AsyncIterator[reward_pb2_grpc.RewardServiceStub]:
    async with connect(server.address) as channel:
        yield reward_pb2_grpc.RewardServiceStub(channel)


@pytest.mark.parametrize("cls", [c for c in error_classes() if c.status != "UNKNOWN"])
async def test_a_client_catches_the_class_the_server_raised(servicer, stub, cls: type[HeadraceError]) -> None:
    servicer.error = cls("staleness 5 exceeds max_staleness 4")
    seconds = 3 if issubclass(cls, Unavailable | DiskFull) else 60  # it is retried until the deadline, then raised
    with pytest.raises(cls, match="staleness 5") as caught:
        await call(stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=seconds)
    assert type(caught.value) is cls


@pytest.mark.parametrize("cls", [NotFound, InvalidArgument])
@pytest.mark.parametrize(
    "text", ["x" * 100_000, "\ud800" * 100_000, "𝄞" * 30_000], ids=["ascii", "surrogates", "music"]
)
async def test_a_long_message_arrives_cut_and_under_its_own_status(
    servicer, stub, cls: type[HeadraceError], text: str
) -> None:
    servicer.error = cls(text, reason=text, **{f"{i}{text}": text for i in range(100)})
    if isinstance(servicer.error, InvalidArgument):
        servicer.error.field = text
    with pytest.raises(cls, match=r"\(cut\)$") as caught:
        await call(stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=60)
    assert 100 < len(caught.value.message) <= 2048


async def test_details_travel(servicer, stub) -> None:
    servicer.error = InvalidArgument("epoch is -1", field="epoch", stream="train")
    with pytest.raises(InvalidArgument) as bad:
        await call(stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=60)
    assert (bad.value.field, bad.value.metadata) == ("epoch", {"stream": "train"})
    servicer.error = ResourceExhausted("full", retry_after_seconds=2.5)
    with pytest.raises(ResourceExhausted) as full:
        await call(stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=60)
    assert full.value.retry_after_seconds == 2.5
    servicer.error = Fenced("epoch 1 is over")
    with pytest.raises(grpc.aio.AioRpcError) as raw:
        await stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=60)
    status = status_pb2.Status.FromString(
        next(value for key, value in raw.value.trailing_metadata() if key == "grpc-status-details-bin")
    )
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("FENCED", "headrace")


@pytest.mark.parametrize("cls", [Unavailable, DiskFull])
async def test_a_client_comes_back_no_sooner_than_the_server_asked_for(servicer, stub, cls) -> None:
    """Its own backoff would be shorter."""
    servicer.error = cls("away", retry_after_seconds=0.8)
    calling = asyncio.create_task(call(stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=120.0))
    async with asyncio.timeout(60):
        while len(servicer.called_at) < 3:
            await asyncio.sleep(0.01)
    servicer.error = None
    await calling
    assert all(later - earlier >= 0.8 for earlier, later in pairwise(servicer.called_at))


@pytest.mark.parametrize(
    ("open_client", "ask", "named"),
    [
        (BufferClient, "position", "the buffer"),
        (RolloutClient, "get_fleet", "the rollout service"),
        (RewardClient, "list_scorers", "the reward service"),
        (TrainerClient, "status", "the trainer"),
    ],
)
async def test_who_is_away_and_where_is_in_the_message(open_client, ask: str, named: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    seconds = {} if open_client is RewardClient else {"deadline_seconds": 0.3}
    async with open_client(address, **seconds) as client:
        with pytest.raises(HeadraceError, match=f"^{named} at {address} gave no answer within"):
            await getattr(client, ask)(**({} if seconds else {"deadline_seconds": 0.3}))


async def test_a_bug_is_internal_and_the_server_lives(servicer, stub) -> None:
    servicer.error = KeyError("boom")
    with pytest.raises(Internal, match="KeyError"):
        await call(stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=60)
    servicer.error = None
    await call(stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=60)


async def test_a_deadline_ends_the_call_on_both_sides(servicer, stub) -> None:
    servicer.seconds = 60
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        await call(stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=0.2)


async def test_a_call_waits_for_a_server_that_comes_back(servicer) -> None:
    port = free_port()
    async with connect(f"127.0.0.1:{port}") as channel:
        pending = asyncio.create_task(
            call(
                reward_pb2_grpc.RewardServiceStub(channel).ListScorers,
                reward_pb2.ListScorersRequest(),
                deadline_seconds=60,
            )
        )
        service = Service(servicer, reward_pb2_grpc.add_RewardServiceServicer_to_server, NAME)
        server = RpcServer("test", f"127.0.0.1:{port}", [service])
        await server.start()
        assert await pending == reward_pb2.ListScorersResponse()
        await server.stop(0)


async def test_health_serves_then_drains(server: RpcServer, servicer, stub) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    servicer.seconds = 0.3
    pending = asyncio.create_task(call(stub.ListScorers, reward_pb2.ListScorersRequest(), deadline_seconds=60))
    await servicer.entered.wait()
    await server.stop(60)
    assert await pending == reward_pb2.ListScorersResponse()


async def test_a_taken_port_is_named(server: RpcServer) -> None:
    second = RpcServer("second", server.address, [])
    with pytest.raises(Unavailable, match=f"{server.port}.*in use.*--address"):
        await second.start()


@pytest.mark.parametrize("metrics_address", ["0.0.0.0:9100", "[::]:9100", "10.0.0.1:9100", "example.org:9100"])
async def test_so_does_a_routable_metrics_address(metrics_address: str) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines.*--insecure"):
        RpcServer("reward", "127.0.0.1:0", [], metrics_address=metrics_address)
    assert RpcServer("reward", "127.0.0.1:0", [], metrics_address=metrics_address, insecure=True)


def test_a_caller_that_leaves_while_its_answer_is_sent_writes_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("test")
    grpcs = logging.getLogger("grpc._cython.cygrpc")
    monkeypatch.setattr(grpcs, "disabled", False)  # a library that another test has loaded may have silenced it
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    kept: list[logging.LogRecord] = []
    collector = logging.Handler()
    collector.emit = kept.append  # type: ignore[method-assign]
    monkeypatch.setattr(grpcs, "handlers", [collector])
    for error in (cygrpc.ExecuteBatchError("a caller left"), RuntimeError("of the server")):
        try:
            raise error
        except Exception:  # noqa: BLE001  # what is logged may be anything
            grpcs.exception("raised by servicer method")
    (record,) = kept
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)


def test_a_log_on_a_full_disk_fails_nobodys_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        with pytest.raises(OSError, match="No space left"):
            full.write("it is full\n")
        monkeypatch.setattr(sys, "stderr", full)
        configure_logging("test")
        for number in range(10_000):
            log.error("rpc_failed", number=number)
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()


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
