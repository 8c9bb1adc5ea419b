"""Translates protos to scored items and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.api.reward.v1.reward_pb2_grpc import RewardServiceServicer
from headrace.errors import InvalidArgument
from headrace.score import ScoreError, ScoreItem, pack_result
from headrace.trajectory import Status
from headrace.wire.checks import require_json_object, shown
from headrace.wire.limits import MAX_SCORE_ITEMS_PER_CALL
from services.reward.scoring import BatchScorer

_BYTES_IN_A_TURN = 256 << 10
_STATUSES = ("", *(status.value for status in Status))


class RewardServicer(RewardServiceServicer):
    def __init__(self, batch_scorer: BatchScorer) -> None:
        self._scorer = batch_scorer

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        if not 1 <= len(request.items) <= MAX_SCORE_ITEMS_PER_CALL:
            raise InvalidArgument(
                f"{len(request.items)} items: send 1 to {MAX_SCORE_ITEMS_PER_CALL} in a call", field="items"
            )
        ids = [item.item_id for item in request.items]
        if len(set(ids)) < len(ids):
            raise InvalidArgument("two items have the same item_id: it must be unique in the call", field="items")
        items = [item async for item in _unpacked_in_turns(request)]
        results = await self._scorer.score(items, request.scorer or None, peer=context.peer())
        return pb.ScoreResponse(results=[pack_result(*pair) for pair in zip(ids, results, strict=True)])

    async def ListScorers(self, request: pb.ListScorersRequest, context: Any) -> pb.ListScorersResponse:
        default = self._scorer.registry.default
        return pb.ListScorersResponse(
            scorers=[
                pb.Scorer(name=s.name, version=s.version, description=s.description, is_default=s.name == default)
                for s in self._scorer.registry.all()
            ]
        )


async def _unpacked_in_turns(request: pb.ScoreRequest) -> AsyncIterator[ScoreItem | ScoreError]:
    """Yields all items without holding up the event loop."""
    num_bytes = 0
    for packed in request.items:
        num_bytes += packed.ByteSize()
        if num_bytes > _BYTES_IN_A_TURN:
            num_bytes = 0
            await asyncio.sleep(0)
        yield _unpacked(packed)


def _unpacked(packed: pb.ScoreItem) -> ScoreItem | ScoreError:
    """Turns what is wrong with one item into that item's own error."""
    try:
        require_json_object(packed.metadata_json, "metadata_json")
        item = ScoreItem.unpack(packed)
        if item.status not in _STATUSES:
            raise InvalidArgument(f"status is {shown(item.status)}, must be one of {', '.join(_STATUSES)}")
    except InvalidArgument as error:
        return ScoreError("ITEM_INVALID", error.message)
    return item
