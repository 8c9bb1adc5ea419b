"""Rewards for samples: which service and scorer are asked now, and what happens when they do not answer.

A group waits under one deadline: `patience_seconds` for a service or a scorer that is unreachable, and twice
`item_seconds` for each `_SCORED_AT_ONCE` items that are begun.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from headrace.client.reward import RewardClient, score_until
from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.limits import MAX_SCORE_REQUEST_BYTES
from headrace.rpc.log import log
from headrace.score import Score, ScoreItem, ScoreResult, scored_columns
from headrace.trajectory import Failure, Sample, Status, turns_in

_MOST_COLUMN_BYTES = MAX_SCORE_REQUEST_BYTES // 2
# A call may wait that long for a service that is being replaced; SetReward takes effect between calls.
_CALL_SECONDS = 20.0
_SCORED_AT_ONCE = 16
_KEPT_CLIENTS = 8  # their calls on the way may finish; those of the ones before are made again at the new address


@dataclass(frozen=True, slots=True)
class RewardTarget:
    """The reward service in use, and since when. An empty scorer means the service's default.

    There is no address in a run that scores nothing.
    """

    address: str | None
    scorer: str
    since: datetime


class SampleScorer:
    """Sends whole groups to the reward service. A sample that could not be scored is FAILED, never a reward of 0."""

    def __init__(
        self,
        address: str | None,
        *,
        item_seconds: float,
        call_seconds: float = _CALL_SECONDS,
        patience_seconds: float = 300.0,
    ) -> None:
        self.target = RewardTarget(address, "", datetime.now(UTC))
        self._client = None if address is None else RewardClient(address)
        self._former: list[RewardClient] = []
        self._item_seconds = item_seconds
        self._call_seconds = call_seconds
        self._patience_seconds = patience_seconds
        self.being_scored = 0

    async def retarget(self, *, address: str | None, scorer: str | None) -> RewardTarget:
        """Takes effect from the next call on; calls on their way finish where they are. None changes nothing."""
        if address is not None and address != self.target.address:
            client = RewardClient(address)
            self._former += [self._client] if self._client else []
            self._client = client
            if len(self._former) > _KEPT_CLIENTS:
                await self._former.pop(0).close()
        self.target = RewardTarget(
            self.target.address if address is None else address,
            self.target.scorer if scorer is None else scorer,
            datetime.now(UTC),
        )
        log.info("reward_changed", address=self.target.address, scorer=self.target.scorer)
        return self.target

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in [*self._former, self._client] if client))

    async def score(
        self,
        samples: Sequence[Sample],
        *,
        evaluation: bool = False,
        waited_seconds: float = 0.0,
        away: asyncio.Event | None = None,
    ) -> list[Sample]:
        """Returns the samples with rewards, or FAILED with the reason. No candidate scores those of an `evaluation`.

        `away` is set when the service or the scorer is found unreachable; `waited_seconds` went before this call.
        Samples that failed before or have a reward already are unchanged.
        """
        waiting = [sample for sample in samples if sample.status is not Status.FAILED and sample.reward is None]
        if not waiting:
            return list(samples)
        self.being_scored += len(waiting)
        try:
            results = await self._results(_items(waiting), evaluation, waited_seconds, away or asyncio.Event())
        except HeadraceError as error:
            failure = Failure(f"REWARD_{error.reason}", error.message)
            scored = {sample.sample_id: _failed(sample, failure) for sample in waiting}
        else:
            pairs = zip(waiting, results, strict=True)
            scored = {sample.sample_id: _with_score(sample, result) for sample, result in pairs}
        finally:
            self.being_scored -= len(waiting)
        return [scored.get(sample.sample_id, sample) for sample in samples]

    async def _results(
        self, items: Sequence[ScoreItem], evaluation: bool, waited_seconds: float, away: asyncio.Event
    ) -> Sequence[ScoreResult]:
        """Raises Unavailable when there was no answer in time; other errors, which waiting cannot help, at once."""
        rounds = -(-len(items) // _SCORED_AT_ONCE)
        scoring_seconds = 2 * self._item_seconds * rounds
        deadline_seconds = max(self._patience_seconds - waited_seconds, 0.0) + scoring_seconds
        call_seconds = max(self._call_seconds, scoring_seconds)

        async def ask(some: Sequence[ScoreItem], left_seconds: float) -> Sequence[ScoreResult]:
            scorer = self.target.scorer or None
            if self._client is None:
                raise FailedPrecondition("this run has no reward service: start one and name it with SetReward")
            seconds = min(left_seconds, call_seconds)
            return await self._client.ask(some, scorer, deadline_seconds=seconds, evaluation=evaluation, waits=False)

        def may_help(error: HeadraceError) -> bool:
            """False for errors that neither a repaired service nor another one, named by SetReward, would mend."""
            if isinstance(error, InvalidArgument | NotFound):
                return False
            if not away.is_set():  # one line for an outage, however often it is asked
                log.warning("reward_unavailable", address=self.target.address, error=error.message)
            if isinstance(error, Unavailable):
                away.set()
            return True

        try:
            return await score_until(time.monotonic() + deadline_seconds, items, ask, may_help)
        except (InvalidArgument, NotFound):
            raise
        except HeadraceError as error:
            raise Unavailable(
                f"{self.target.address} did not score for {deadline_seconds:g} s: {error.message}"
            ) from error


def _items(samples: Sequence[Sample]) -> list[ScoreItem]:
    """Sends tokens, masks, log-probs and turns along, unless a group's are more than a request can hold."""
    num_bytes = sum(array.nbytes for sample in samples for array in scored_columns(sample).values())
    num_bytes += sum(len(turn["content"]) for sample in samples for turn in turns_in(sample.hook_fields))
    fits = num_bytes <= _MOST_COLUMN_BYTES
    if not fits:
        log.warning("scored_without_tokens", samples=len(samples), num_bytes=num_bytes, most=_MOST_COLUMN_BYTES)
    return [ScoreItem.of(sample, has_columns=fits) for sample in samples]


def _with_score(sample: Sample, result: ScoreResult) -> Sample:
    if not isinstance(result, Score):
        return _failed(sample, Failure(result.reason, result.message))
    return replace(
        sample,
        reward=result.value,
        reward_parts=dict(result.parts),
        scorer=result.scorer,
        scorer_version=result.scorer_version,
        metadata=sample.metadata if result.metadata is None else result.metadata,
    )


def _failed(sample: Sample, failure: Failure) -> Sample:
    log.warning("sample_not_scored", sample_id=sample.sample_id, reason=failure.reason, message=failure.message)
    return replace(sample, status=Status.FAILED, failure=failure)
