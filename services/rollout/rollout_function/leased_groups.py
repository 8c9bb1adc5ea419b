"""Groups that the producer has leased, on their way through a rollout function.

A group waits → is taken by a call → ends, once: with samples, given back, dropped or failed. One whose lease ends
leaves wherever it is. The groups that wait, and how the ledger answered last, decide when a call begins and what it
may take.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import FailedPrecondition
from headrace.trajectory import Sample
from services.rollout.production.ledger import ProducerLedger
from services.rollout.production.sampling import SampleRequest

_WAYS = (
    "return them, give some back with data_source.add_samples(groups), or give up those that you leave out with "
    "data_source.drop_samples(groups)"
)


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """`ended` gets its samples, or the exception that says how it ends without any."""

    lease_number: int
    requests: Sequence[SampleRequest]
    ended: asyncio.Future[list[Sample]]


class LeasedGroups:
    """The groups of one producer; at most `most` are leased at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers = itertools.count()
        self._waiting: OrderedDict[int, StepGroup] = OrderedDict()
        self._num_taken = 0
        self._empty_answers = 0
        self._reason = buffer_pb2.NO_LEASE_REASON_UNSPECIFIED
        self._oldest_version = 0
        self._news = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """The number of groups that no call has taken."""
        return len(self._waiting)

    def answered(self, answer: buffer_pb2.LeaseGroupsResponse) -> None:
        """The ledger answered a request for leases. One that was answered early, by news for the producer, is no no."""
        if not answer.leases and answer.oldest_version == self._oldest_version:
            self._empty_answers += 1
            self._reason = answer.no_lease_reason
        self._oldest_version = answer.oldest_version
        self._tell()

    async def samples(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Waits until a call has ended the group. Raises what it ended with."""
        group = StepGroup(next(self._numbers), requests, asyncio.get_running_loop().create_future())
        self._waiting[group.lease_number] = group
        self._tell()
        try:
            return await group.ended
        finally:
            if self._waiting.pop(group.lease_number, None) is None:
                self._num_taken -= 1
            self._tell()

    async def enough(self, count: int) -> int:
        """Waits until `count` groups wait, or some do and the ledger lets out no more. Returns their number."""
        answers = self._empty_answers
        while not self._waiting or not (len(self._waiting) >= count or self._is_shut(answers)):
            await self._wait()
        return min(len(self._waiting), count)

    async def take(self, count: int, *, held: int) -> list[StepGroup]:
        """Takes `count` groups, or fewer where the ledger lets out no more.

        Raises FailedPrecondition where it lets out none before some of the `held` ones have ended.
        """
        answers = self._empty_answers
        while len(self._waiting) < count:
            if self._waiting and self._is_shut(answers):
                break
            if not self._waiting and held and self._is_shut(answers) and not self._may_be_submitted:
                raise FailedPrecondition(self._no_more(held))
            await self._wait()
        return self.take_now(count)

    def take_now(self, count: int) -> list[StepGroup]:
        """Takes at most `count` groups that wait."""
        taken = [self._waiting.popitem(last=False)[1] for _ in range(min(count, len(self._waiting)))]
        self._num_taken += len(taken)
        return taken

    def put_back(self, groups: Sequence[StepGroup]) -> None:
        """They wait again, before all others, but for those whose lease has ended."""
        for group in reversed([group for group in groups if not group.ended.done()]):
            self._waiting[group.lease_number] = group
            self._waiting.move_to_end(group.lease_number, last=False)
            self._num_taken -= 1
        self._tell()

    def _is_shut(self, answers: int) -> bool:
        return self._is_full or self._empty_answers > answers

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) + self._num_taken >= self._most

    @property
    def _may_be_submitted(self) -> bool:
        return not self._is_full and self._reason == buffer_pb2.NO_LEASE_REASON_NO_PROMPTS

    def _no_more(self, held: int) -> str:
        if self._is_full:
            return f"this call has {held} groups, and --max-groups-in-flight allows {self._most}: {_WAYS}, or raise it"
        if self._reason == buffer_pb2.NO_LEASE_REASON_EXHAUSTED:
            return f"all prompts have been read (--num-epoch), and this call has the last {held} groups: {_WAYS}"
        return (
            f"the ledger lets out no more groups while this call has {held}: {_WAYS}. "
            "--over-sampling-batch-size is how many a step may have at once, --max-staleness how many steps ahead"
        )

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _wait(self) -> None:
        await self._news.wait()


class ToldLedger:
    """A producer's ledger whose answers the leased groups are told of."""

    def __init__(self, ledger: ProducerLedger, groups: LeasedGroups) -> None:
        self._ledger = ledger
        self._groups = groups

    async def lease(self, max_groups: int) -> buffer_pb2.LeaseGroupsResponse:
        """Waits some seconds for the first group; may return none."""
        answer = await self._ledger.lease(max_groups)
        self._groups.answered(answer)
        return answer

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        """Returns the ids of leases that have ended."""
        return await self._ledger.renew(lease_ids)

    async def put(self, group: buffer_pb2.GroupPut) -> buffer_pb2.PutResult:
        """Ends a lease with a result."""
        return await self._ledger.put(group)

    async def release(self, releases: Sequence[buffer_pb2.LeaseRelease]) -> None:
        """Returns leases unfinished; their groups are queued again."""
        await self._ledger.release(releases)
