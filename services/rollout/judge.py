"""Rewards for samples: which service and scorer judge now, and what happens when they cannot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import grpc

from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.errors import HeadraceError
from headrace.rpc.call import call
from headrace.rpc.channel import connect
from headrace.rpc.log import log
from headrace.trajectory import Failure, Sample, Status, to_json

# One call may wait for a reward service that is being replaced; SetReward takes effect between calls.
_CALL_SECONDS = 20.0
_TRIES = 3


@dataclass(frozen=True, slots=True)
class JudgeTarget:
    """Who judges, and since when. An absent scorer means the service's default."""

    address: str
    scorer: str
    since: datetime


class Judge:
    """Sends whole groups to the reward service. A sample that nobody could judge is FAILED, never a reward of 0."""

    def __init__(self, address: str, scorer: str, *, item_seconds: float, patience_seconds: float = 300.0) -> None:
        self._channel = connect(address)
        self.target = JudgeTarget(address, scorer, datetime.now(UTC))
        self._call_seconds = max(_CALL_SECONDS, 2 * item_seconds)
        self._patience_seconds = patience_seconds

    async def retarget(self, *, address: str | None, scorer: str | None) -> JudgeTarget:
        """From the next call on. None leaves as it is."""
        old, new_channel = self._channel, connect(address) if address is not None else self._channel
        self.target = JudgeTarget(
            self.target.address if address is None else address,
            self.target.scorer if scorer is None else scorer,
            datetime.now(UTC),
        )
        self._channel = new_channel
        if old is not new_channel:
            await old.close(self._call_seconds)  # calls on their way may finish
        log.info("reward_changed", address=self.target.address, scorer=self.target.scorer)
        return self.target

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close(None)

    async def judge(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with rewards, or FAILED with the reason; those that failed before stay as they are."""
        waiting = {s.sample_id: s for s in samples if s.status is not Status.FAILED}
        judged: dict[str, Sample] = {}
        for tries_left in reversed(range(_TRIES)):
            if not waiting:
                break
            results = await self._score(list(waiting.values()))
            for sample_id, result in results.items():
                if result.HasField("error") and result.error.retryable and tries_left:
                    continue
                judged[sample_id] = _with_result(waiting.pop(sample_id), result)
        return [judged.get(s.sample_id, s) for s in samples]

    async def _score(self, samples: Sequence[Sample]) -> dict[str, reward_pb2.ScoreResult]:
        end = time.monotonic() + self._patience_seconds
        while True:
            request = reward_pb2.ScoreRequest(items=[_item(s) for s in samples], scorer=self.target.scorer)
            try:
                reply = await self._call(self._channel, request, len(samples))
            except HeadraceError as error:
                log.warning("reward_unavailable", address=self.target.address, error=error.message)
                if time.monotonic() > end or error.status in _HOPELESS:
                    failed = reward_pb2.ScoreError(reason=f"REWARD_{error.reason}", message=error.message)
                    return {s.sample_id: reward_pb2.ScoreResult(item_id=s.sample_id, error=failed) for s in samples}
                await asyncio.sleep(1.0)
            else:
                return {result.item_id: result for result in reply.results}

    async def _call(
        self, channel: grpc.aio.Channel, request: reward_pb2.ScoreRequest, num_items: int
    ) -> reward_pb2.ScoreResponse:
        stub = reward_pb2_grpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        seconds = self._call_seconds * max(1.0, num_items / 16)
        try:
            reply: reward_pb2.ScoreResponse = await call(stub.Score, request, deadline_seconds=seconds)
        except grpc.aio.UsageError:
            # The channel was closed by a retarget while we waited on it.
            reply = await self._call(self._channel, request, num_items)
        return reply


_HOPELESS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


def _item(sample: Sample) -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(
        item_id=sample.sample_id,
        prompt=sample.prompt,
        response=sample.response,
        label=sample.label,
        metadata_json=to_json(sample.metadata),
        group_id=sample.group_id,
        status=sample.status.value,
        response_tokens=sample.response_length,
    )


def _with_result(sample: Sample, result: reward_pb2.ScoreResult) -> Sample:
    if result.HasField("score"):
        score = result.score
        return replace(
            sample,
            reward=score.value,
            reward_parts=dict(score.parts),
            scorer=score.scorer,
            scorer_version=score.scorer_version,
        )
    failure = Failure(result.error.reason or "REWARD_FAILED", result.error.message)
    log.warning("sample_not_judged", sample_id=sample.sample_id, reason=failure.reason, message=failure.message)
    return replace(sample, status=Status.FAILED, failure=failure)
