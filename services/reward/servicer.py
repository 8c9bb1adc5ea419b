"""Proto to domain and back, nothing else."""

from __future__ import annotations

from typing import Any

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.api.reward.v1.reward_pb2_grpc import RewardServiceServicer
from headrace.client.reward import MAX_ITEMS
from headrace.errors import InvalidArgument
from headrace.judgement import ScoreItem, pack_result
from services.reward.judge import Judge


class RewardServicer(RewardServiceServicer):
    """Serves a Judge."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        if not 1 <= len(request.items) <= MAX_ITEMS:
            raise InvalidArgument(f"{len(request.items)} items: send 1 to {MAX_ITEMS} in a call", field="items")
        items = [_unpacked(i, item) for i, item in enumerate(request.items)]
        if len({item.item_id for item in items}) < len(items):
            raise InvalidArgument("two items have the same item_id: it must be unique in the call", field="items")
        judgements = await self._judge.judge(items, request.scorer or None)
        pairs = zip(items, judgements, strict=True)
        return pb.ScoreResponse(results=[pack_result(item.item_id, judgement) for item, judgement in pairs])

    async def ListScorers(self, request: pb.ListScorersRequest, context: Any) -> pb.ListScorersResponse:
        default = self._judge.registry.default
        return pb.ListScorersResponse(
            scorers=[
                pb.Scorer(name=s.name, version=s.version, description=s.description, is_default=s.name == default)
                for s in self._judge.registry.all()
            ]
        )


def _unpacked(position: int, packed: pb.ScoreItem) -> ScoreItem:
    try:
        return ScoreItem.unpack(packed)
    except InvalidArgument as error:
        field = f"items[{position}].metadata_json"
        raise InvalidArgument(f"{field}: {error.message}", field=field) from error
