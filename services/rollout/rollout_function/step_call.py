"""One call of a rollout function: the groups that it has taken, and how each of them ends.

consumes: orders of the call's data source; waits for: leased groups, and for verdicts on weights before it accepts
samples; produces: the end of every group that was taken, at the latest when the call has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.hooks import Sample as HookSample
from headrace.hooks.rollout import messages
from headrace.hooks.rollout.function import RolloutReport
from headrace.rpc.log import log
from headrace.trajectory import Failure, Sample
from headrace.wire.checks import cut_text
from services.rollout.engine.activity import Activity
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.given import GivenBack, GivenUp
from services.rollout.production.hooks.hook_samples import HookSamples, WeightsRefused
from services.rollout.production.sampling import SampleRequest, failed_sample
from services.rollout.rollout_function.leased_groups import LeasedGroups, StepGroup

_MOST_ASKED = 1 << 20


class StepCall:
    """States of a group in it: taken → ended."""

    def __init__(
        self, path: str, groups: LeasedGroups, samples: HookSamples, weights: ServedWeights, activity: Activity
    ) -> None:
        self._path = path
        self._groups = groups
        self._samples = samples
        self._weights = weights
        self._activity = activity
        self._requests = ExitStack()
        self._oldest = weights.policy_version
        self._refusals = weights.refusals
        self._held: dict[int, StepGroup] = {}
        self._num_taken = 0

    async def answer(self, order: messages.Order) -> messages.Reply:
        """Carries out an order of the data source; what is wrong with it is its answer."""
        try:
            match order:
                case messages.GetSamples(count):
                    return await self._take(count)
                case messages.ReturnSamples(made):
                    await self._return(self._group(made.lease_number), made.samples)
                case messages.AddSamples(made):
                    await self._give_back(self._group(made.lease_number), made.samples)
                case messages.DropSamples(number, reason, rewards):
                    self._end(self._group(number), GivenUp(cut_text(reason), rewards))
                case messages.FailSamples(number, why):
                    self._fail(self._group(number), Failure("HOOK_INVALID", cut_text(why)))
                case messages.Hello():
                    raise InvalidArgument("the connection has said already whose it is")
        except (InvalidArgument, FailedPrecondition) as error:
            return messages.OrderRefused(error.message)
        return messages.OrderDone()

    def finish(self, report: RolloutReport) -> None:
        """Ends the groups that are left when the function has returned."""
        if self._held and report.num_ended:
            log.info("rollout_groups_not_returned", hook=self._path, groups=len(self._held))
            self._end_all(GivenBack(f"hook {self._path} did not return it"))
        else:
            why = report.unusable[0] if report.unusable else f"it returned none of {len(self._held)} groups"
            self.fail(Failure("HOOK_INVALID", cut_text(f"hook {self._path}: {why}")))

    def fail(self, failure: Failure) -> None:
        """Ends the groups that are left with a failure of all their samples."""
        for group in list(self._held.values()):
            self._fail(group, failure)
        self._requests.close()

    def give_back(self, why: str) -> None:
        """Ends the groups that are left as if they had not been leased."""
        self._end_all(GivenBack(why))

    def begin(self) -> None:
        """The function begins; or again, where its worker ended: what it had taken waits for it."""
        self._groups.put_back(list(self._held.values()))
        self._held.clear()

    def charge(self, num_groups: int) -> None:
        """Ends as many groups as the function was called for if it took none: it would be called again without end."""
        if not self._num_taken:
            self._hold(self._groups.take_now(num_groups))

    def _hold(self, taken: Sequence[StepGroup]) -> None:
        for group in taken:
            self._held[group.lease_number] = group
            self._requests.enter_context(self._activity.requests(len(group.requests)))
        self._num_taken += len(taken)

    async def _take(self, count: int) -> messages.Reply:
        taken = await self._groups.take(min(max(count, 1), _MOST_ASKED), held=len(self._held))
        self._hold(taken)
        given = [(group.lease_number, [self._samples.given(request) for request in group.requests]) for group in taken]
        return messages.Groups([messages.LeasedGroup(*each) for each in given])

    def _group(self, lease_number: int) -> StepGroup:
        if lease_number not in self._held:
            raise InvalidArgument("a group is not, or not any more, one of this call")
        return self._held[lease_number]

    async def _return(self, group: StepGroup, by_place: Sequence[Sequence[HookSample]]) -> None:
        await self._weights.wait_for_verdicts()
        if self._weights.refusals != self._refusals:
            self._end(group, WeightsRefused(f"weights were refused while hook {self._path} ran: it runs again"))
            return
        try:
            self._end(group, await self._stored(group, by_place))
        except WeightsRefused as refused:
            self._end(group, refused)

    async def _stored(self, group: StepGroup, by_place: Sequence[Sequence[HookSample]]) -> list[Sample]:
        if len(by_place) != len(group.requests):
            raise InvalidArgument(f"a group has {len(group.requests)} places, {len(by_place)} came")
        oldest = min(self._oldest, self._weights.policy_version)
        stored: list[Sample] = []
        for request, made in zip(group.requests, by_place, strict=True):
            stored += await self._samples.of_one(request, made, oldest) if made else [self._missing(request)]
        return stored

    def _missing(self, request: SampleRequest) -> Sample:
        message = f"hook {self._path} returned the group without a sample of index {request.index}"
        return failed_sample(request, Failure("HOOK_INCOMPLETE", message))

    async def _give_back(self, group: StepGroup, by_place: Sequence[Sequence[HookSample]]) -> None:
        begun: list[Sample] = []
        for request, made in zip(group.requests, by_place, strict=False):
            if len(made) == 1 and made[0].response_length:
                if made[0].status is HookSample.Status.PENDING:
                    made[0].status = HookSample.Status.ABORTED
                begun += await self._samples.of_one(request, made, self._oldest)
        self._end(group, GivenBack(f"hook {self._path} gave it back", begun))

    def _fail(self, group: StepGroup, failure: Failure) -> None:
        log.warning("hook_failed", hook=self._path, group_id=group.requests[0].group_id, message=failure.message)
        self._end(group, [failed_sample(request, failure) for request in group.requests])

    def _end_all(self, outcome: Exception) -> None:
        for group in list(self._held.values()):
            self._end(group, outcome)
        self._requests.close()

    def _end(self, group: StepGroup, outcome: list[Sample] | Exception) -> None:
        """One whose lease has ended meanwhile has nobody who waits for it."""
        self._held.pop(group.lease_number, None)
        if group.ended.done():
            return
        if isinstance(outcome, Exception):
            group.ended.set_exception(outcome)
        else:
            group.ended.set_result(outcome)
