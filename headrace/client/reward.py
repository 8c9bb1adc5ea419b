"""The reward service's client. A service that is being replaced at its address is waited for, until the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.api.reward.v1.reward_pb2_grpc import RewardServiceStub
from headrace.errors import DeadlineExceeded, Internal, ResourceExhausted
from headrace.judgement import Judgement, ScoreError, ScoreItem, unpack_result
from headrace.rpc.call import call, pause_seconds
from headrace.rpc.channel import connect
from headrace.wire.limits import MAX_SCORE_ITEMS_PER_CALL

_BACKOFF_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """A scorer that a service has."""

    name: str
    version: str
    description: str
    is_default: bool


class RewardClient:
    """Asks one reward service."""

    def __init__(self, address: str) -> None:
        self._channel = connect(address)
        self._peer = f"the reward service at {address}"
        self._stub = RewardServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def score(
        self, items: Sequence[ScoreItem], scorer: str | None = None, *, deadline_seconds: float
    ) -> list[Judgement]:
        """One judgement an item, in order; items with a retryable error are tried once more.

        Raises NotFound for an unknown `scorer`, and what `call` raises when the service cannot be had in time.
        """
        end = time.monotonic() + deadline_seconds
        results: list[Judgement] = []
        for start in range(0, len(items), MAX_SCORE_ITEMS_PER_CALL):
            results += await self._ask(items[start : start + MAX_SCORE_ITEMS_PER_CALL], scorer, end)
        again = [i for i, result in enumerate(results) if isinstance(result, ScoreError) and result.retryable]
        for start in range(0, len(again), MAX_SCORE_ITEMS_PER_CALL):
            part = again[start : start + MAX_SCORE_ITEMS_PER_CALL]
            for i, result in zip(part, await self._ask([items[i] for i in part], scorer, end), strict=True):
                results[i] = result
        return results

    async def list_scorers(self, *, deadline_seconds: float = 10.0) -> list[ScorerInfo]:
        """The scorers there are, by name."""
        reply = await call(
            self._stub.ListScorers, pb.ListScorersRequest(), deadline_seconds=deadline_seconds, peer=self._peer
        )
        return [ScorerInfo(s.name, s.version, s.description, s.is_default) for s in reply.scorers]

    async def close(self) -> None:
        """Ends the channel."""
        await self._channel.close(None)

    async def __aenter__(self) -> RewardClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, items: Sequence[ScoreItem], scorer: str | None, end: float) -> list[Judgement]:
        request = pb.ScoreRequest(items=[item.pack() for item in items], scorer=scorer or "")
        while True:
            try:
                reply = await call(self._stub.Score, request, deadline_seconds=end - time.monotonic(), peer=self._peer)
                break
            except ResourceExhausted as full:
                pause = pause_seconds(full, _BACKOFF_SECONDS)
                if time.monotonic() + pause >= end:
                    raise
                await asyncio.sleep(pause)
            except DeadlineExceeded:
                if time.monotonic() >= end:
                    raise
                # The server ends a call earlier than we would. What it graded too slowly it remembers and answers next.
        if [result.item_id for result in reply.results] != [item.item_id for item in items]:
            raise Internal(f"the reward service answered {len(reply.results)} results, not one for each item in order")
        return [unpack_result(result) for result in reply.results]
