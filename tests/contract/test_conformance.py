"""The packaged checks of the protos' promises: headrace's own services keep them, and a broken one is found out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from concurrent import futures
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.api.reward.v1 import reward_pb2_grpc
from headrace.cli.main import main
from headrace.conformance import buffer, reward
from headrace.conformance.checks import results
from headrace.rpc.client import connect
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore
from tests.support.processes.buffer_server import served_buffer
from tests.support.processes.reward_server import served_reward

ITEM = pb.ScoreItem(item_id="0", prompt="1 + 1 =", response="2", label="2")


async def broken(checks: Sequence[Any], subject: Any) -> dict[str, str]:
    """What was not kept, and what happened instead."""
    return {each.promise: each.broken async for each in results(checks, subject) if each.broken is not None}


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_the_buffer_keeps_its_promises(kind: str, tmp_path: Path) -> None:
    store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "ledger")
    async with served_buffer(store, prompt_root=Path("/")) as (_, server), connect(server.address) as channel:
        assert await broken(buffer.CHECKS, buffer.BufferSubject(channel)) == {}


@pytest.mark.parametrize("rm_type", ["exact_match", "math"])
async def test_the_reward_service_keeps_its_promises(rm_type: str) -> None:
    async with served_reward(rm_type=rm_type) as client:
        assert await broken(reward.CHECKS, reward.RewardSubject(client._channel, "", [ITEM])) == {}


class Wrong(reward_pb2_grpc.RewardServiceServicer):
    """Says nothing of versions, gives 0 to what it cannot score, and answers in the order of the responses."""

    def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        items = sorted(request.items, key=lambda item: item.item_id)
        return pb.ScoreResponse(
            results=[pb.ScoreResult(item_id=item.item_id, score=pb.Score(value=0.0, scorer="wrong")) for item in items]
        )

    def ListScorers(self, request: pb.ListScorersRequest, context: Any) -> pb.ListScorersResponse:
        return pb.ListScorersResponse(scorers=[pb.Scorer(name="wrong", is_default=True)])


@asynccontextmanager
async def served_wrongly() -> AsyncIterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Wrong(), server)
    state = health.HealthServicer()
    state.set(reward.SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


async def test_each_broken_promise_of_a_foreign_service_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    async with served_wrongly() as address:
        assert await asyncio.to_thread(main, ["conformance", "reward", address, "--json"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kept = {check.__name__: each["kept"] for check, each in zip(reward.CHECKS, told, strict=True)}
    assert {name for name, is_kept in kept.items() if not is_kept} == {
        "serves",
        "lists_its_scorers",
        "scores_an_item",
        "answers_in_order",
        "knows_no_other_scorer",
        "refuses_an_empty_request",
        "refuses_equal_ids",
        "refuses_too_many_items",
        "a_bad_item_fails_alone",
    }


def test_options_of_a_reward_service_are_no_options_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "buffer", "127.0.0.1:1", "--scorer", "math"]) == 2
    assert "--scorer" in capsys.readouterr().err
