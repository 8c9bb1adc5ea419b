"""A reward service on a real port that answers as the test says."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.rpc.server import RpcServer, Service

Answer = Callable[[reward_pb2.ScoreItem], reward_pb2.ScoreResult]


class ScriptedReward(reward_pb2_grpc.RewardServiceServicer):
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[reward_pb2.ScoreItem] = []
        self.address = ""

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        self.asked += request.items
        return reward_pb2.ScoreResponse(results=[self.answer(item) for item in request.items])


@contextlib.asynccontextmanager
async def scripted_reward(answer: Answer, address: str = "127.0.0.1:0") -> AsyncIterator[ScriptedReward]:
    servicer = ScriptedReward(answer)
    name = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
    server = RpcServer(
        "reward", address, [Service(servicer, reward_pb2_grpc.add_RewardServiceServicer_to_server, name)]
    )
    await server.start()
    servicer.address = server.address
    try:
        yield servicer
    finally:
        await server.stop(0.1)


def score(value: float, scorer: str = "scripted") -> Answer:
    def answer(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        return reward_pb2.ScoreResult(
            item_id=item.item_id, score=reward_pb2.Score(value=value, scorer=scorer, scorer_version="1")
        )

    return answer


def refuse(reason: str) -> Answer:
    def answer(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        return reward_pb2.ScoreResult(item_id=item.item_id, error=reward_pb2.ScoreError(reason=reason, message="no"))

    return answer
