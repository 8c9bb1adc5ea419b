"""The reward service's client. It waits until the deadline for a service that is being replaced at its address.

One loop asks for scores (`score_until`): it repeats a failed call until the deadline, and an item with a retryable
error once.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.api.reward.v1.reward_pb2_grpc import RewardServiceStub
from headrace.errors import DeadlineExceeded, HeadraceError, Internal, ResourceExhausted, Unavailable
from headrace.limits import MAX_SCORE_ITEMS_PER_CALL
from headrace.rpc.client import DEFAULT_DEADLINE_SECONDS, Closing, call, call_once, connect
from headrace.rpc.retry import Backoff, retry_until
from headrace.score import SCORER_UNAVAILABLE, Score, ScoreError, ScoreItem, ScoreResult, unpack_result


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    name: str
    version: str
    description: str
    is_default: bool


class RewardClient(Closing):
    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = connect(address)
        self._peer = f"the reward service at {address}"
        self._stub = RewardServiceStub(self._channel)

    async def score(
        self, items: Sequence[ScoreItem], scorer: str | None = None, *, deadline_seconds: float
    ) -> list[ScoreResult]:
        """One result an item, in order; items with a retryable error are scored once more.

        Raises NotFound for an unknown `scorer`, and what `call` raises when the service does not answer in time.
        """
        end = time.monotonic() + deadline_seconds

        async def ask(some: Sequence[ScoreItem], left_seconds: float) -> Sequence[ScoreResult]:
            return await self.ask(some, scorer, deadline_seconds=left_seconds)

        return await score_until(end, items, ask, _may_help)

    async def ask(
        self,
        items: Sequence[ScoreItem],
        scorer: str | None,
        *,
        deadline_seconds: float,
        evaluation: bool = False,
        waits: bool = True,
    ) -> Sequence[ScoreResult]:
        """One call, made once, with at most `MAX_SCORE_ITEMS_PER_CALL` items. Raises what the service answers.

        No candidate scores the samples of an `evaluation`. Unless it `waits`, it raises Unavailable at once where the
        service cannot be reached.
        """
        request = pb.ScoreRequest(items=[item.pack() for item in items], scorer=scorer or "", evaluation=evaluation)
        reply = await call_once(
            self._stub.Score, request, deadline_seconds=deadline_seconds, peer=self._peer, waits=waits
        )
        if [result.item_id for result in reply.results] != [item.item_id for item in items]:
            raise Internal(f"the reward service returned {len(reply.results)} results, not one for each item in order")
        return [unpack_result(result) for result in reply.results]

    async def list_scorers(self, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> list[ScorerInfo]:
        """Lists the service's scorers, ordered by name."""
        reply = await call(
            self._stub.ListScorers, pb.ListScorersRequest(), deadline_seconds=deadline_seconds, peer=self._peer
        )
        return [ScorerInfo(s.name, s.version, s.description, s.is_default) for s in reply.scorers]

    async def change_scorer(
        self, request: pb.ChangeScorerRequest, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
    ) -> pb.ScorerState:
        """Makes a change once, whatever happens to the service meanwhile. An empty `change_id` is chosen here.

        Raises InvalidArgument for a scorer that cannot be loaded, FailedPrecondition where there is nothing to change.
        """
        request.change_id = request.change_id or uuid.uuid4().hex
        reply = await call(self._stub.ChangeScorer, request, deadline_seconds=deadline_seconds, peer=self._peer)
        return reply.state

    async def scorer_state(self, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> pb.ScorerState:
        """Who pays and who is tried."""
        reply = await call(
            self._stub.GetScorerState, pb.GetScorerStateRequest(), deadline_seconds=deadline_seconds, peer=self._peer
        )
        return reply.state

    async def close(self) -> None:
        await self._channel.close(None)


async def score_until(
    end: float,
    items: Sequence[ScoreItem],
    ask: Callable[[Sequence[ScoreItem], float], Awaitable[Sequence[ScoreResult]]],
    may_help: Callable[[HeadraceError], bool],
) -> list[ScoreResult]:
    """One result an item, in order, from `ask(some items, seconds left)`.

    Where a scorer was replaced between two calls for one group, all of the group is asked for again, so that one
    scorer has scored it. An item whose scorer is unreachable is asked for again as long as a failed call is. Raises the
    last error when `time.monotonic()` reaches `end`, and at once one for which `may_help` is False.
    """
    results: dict[int, ScoreResult] = {}
    waiting = deque(range(len(items)))
    repeated = set[str]()
    """Groups of which some items were asked for again."""
    unscored = deque[int]()
    """Items whose scorer was unreachable."""
    backoff = Backoff()
    while waiting or unscored or (waiting := _mixed(items, results, repeated)):
        if not waiting:
            await backoff.sleep(at_most=end - time.monotonic())
            waiting, unscored = unscored, waiting
        some = [waiting.popleft() for _ in range(min(len(waiting), MAX_SCORE_ITEMS_PER_CALL))]
        try:
            answers = await retry_until(end, partial(ask, [items[i] for i in some]), may_help)
        except HeadraceError:
            if all(i in results for i in some):
                break  # their first answers stay
            raise
        for i, answer in zip(some, answers, strict=True):
            if isinstance(answer, ScoreError) and answer.retryable:
                error = Unavailable(answer.message, reason=answer.reason)
                if answer.reason == SCORER_UNAVAILABLE and time.monotonic() < end and may_help(error):
                    unscored.append(i)
                elif i not in results:
                    waiting.append(i)
                repeated.add(items[i].group_id)
            results[i] = answer
    return [results[i] for i in range(len(items))]


def _mixed(items: Sequence[ScoreItem], results: Mapping[int, ScoreResult], groups: set[str]) -> deque[int]:
    """The items of those `groups` that have scores of two scorers. Takes them out: once is enough."""
    scorers: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for i, result in results.items():
        if isinstance(result, Score) and items[i].group_id in groups:
            scorers[items[i].group_id].add((result.scorer, result.scorer_version))
    groups.clear()
    return deque(i for i, item in enumerate(items) if len(scorers.get(item.group_id, ())) > 1)


def _may_help(error: HeadraceError) -> bool:
    """A server may end a call before the caller's deadline; it remembers what it scored too slowly and answers next.

    A scorer whose own server is unreachable is the caller's business after a second try.
    """
    return isinstance(error, Unavailable | ResourceExhausted | DeadlineExceeded) and error.reason != SCORER_UNAVAILABLE
