"""The clients without asyncio: all methods of the others, their values, errors and streams."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace.client.reward import RewardClient
from headrace.client.rollout import RolloutClients
from headrace.client.shards import ShardedBuffer
from headrace.client.sync import SyncBuffer, SyncReward, SyncRollout, SyncTrainer
from headrace.client.trainer import TrainerClient
from headrace.errors import FailedPrecondition, InvalidArgument


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self) -> None:
        self.left = threading.Event()

    def GetStatus(self, request: object, context: Any) -> trainer_pb2.GetStatusResponse:
        return trainer_pb2.GetStatusResponse(step=3)

    def WatchProgress(self, request: Any, context: Any) -> Iterator[trainer_pb2.WatchProgressResponse]:
        context.add_callback(self.left.set)
        yield from (trainer_pb2.WatchProgressResponse(step=step) for step in (request.from_step, request.from_step + 1))
        self.left.wait(60.0)

    def ExportModel(self, request: Any, context: Any) -> trainer_pb2.ExportModelResponse:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.path} is not absolute")
        raise AssertionError


class Engines(rollout_pb2_grpc.RolloutServiceServicer):
    def Evaluate(self, request: object, context: Any) -> Iterator[rollout_pb2.EvaluateResponse]:
        yield rollout_pb2.EvaluateResponse(done=1, total=2)
        yield rollout_pb2.EvaluateResponse(done=2, total=2, results=[rollout_pb2.EvalResult(name="sums")])


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def address(trainer: Trainer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8))
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Engines(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    trainer.left.set()
    server.stop(0.0).wait()


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (SyncBuffer, ShardedBuffer),
        (SyncRollout, RolloutClients),
        (SyncReward, RewardClient),
        (SyncTrainer, TrainerClient),
    ],
)
def test_a_client_has_each_method_of_its_asynchronous_one_with_its_arguments(own: type, other: type) -> None:
    methods = {name for name, each in inspect.getmembers(other, callable) if not name.startswith("_")}
    assert {name for name, each in inspect.getmembers(own, callable) if not name.startswith("_")} == methods
    for name in methods - {"close"}:
        assert inspect.signature(getattr(own, name)).parameters == inspect.signature(getattr(other, name)).parameters


def test_a_call_returns_its_value_and_raises_the_servers_error(address: str) -> None:
    with SyncTrainer(address) as client:
        assert client.status().step == 3
        with pytest.raises(InvalidArgument, match="is not absolute"):
            client.export_model(Path("relative"))


def test_a_stream_is_read_as_it_comes_and_ends_where_its_reader_leaves(address: str, trainer: Trainer) -> None:
    with SyncTrainer(address) as client:
        rows = client.watch_progress(5)
        assert [next(rows).step, next(rows).step] == [5, 6]
        rows.close()
        assert trainer.left.wait(30.0)


def test_threads_share_a_client(address: str) -> None:
    with SyncTrainer(address) as client, ThreadPoolExecutor(8) as pool:
        assert [reply.step for reply in pool.map(lambda _: client.status(), range(32))] == [3] * 32


async def test_a_program_with_a_loop_of_its_own_may_use_it(address: str) -> None:
    with SyncTrainer(address) as client:
        assert client.status().step == 3


def test_progress_is_told_meanwhile_and_may_not_call_the_client(address: str) -> None:
    with SyncRollout(address) as client:
        told = []
        (result,) = client.evaluate("e", [], progress=lambda done, total: told.append((done, total)))
        assert (result.name, told) == ("sums", [(1, 2), (2, 2)])
        with pytest.raises(FailedPrecondition, match="callback"):
            client.evaluate("e", [], progress=lambda *_: print(client.get_fleet()))
