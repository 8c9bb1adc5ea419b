"""A user's rollout function in the place of headrace's own generation: for whole steps, and for evaluations.

In: leased groups from the producer, each waiting for its samples. Out: their samples, or how each group ends without.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unavailable
from headrace.hooks import HookArgs
from headrace.hooks import Sample as HookSample
from headrace.hooks.failure import call_failure
from headrace.hooks.rollout import messages
from headrace.hooks.rollout.function import RolloutReport, load_rollout, run_rollout
from headrace.limits import MAX_HOOK_ANSWER_BYTES, cut_text
from headrace.process.scratch import folder_for_sockets
from headrace.process.worker_main import Unreadable, decode_as
from headrace.process.workers import WorkerError
from headrace.rpc.log import kept_running, log
from headrace.trajectory import Failure, Sample
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.fleet import Activity
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.groups import GroupFiltered, LeaseReturned
from services.rollout.production.hooks import SampleCodec, UserFunction, WeightsRefused
from services.rollout.production.sampling import SampleRequest, failed_sample

# Groups that the producer has leased, on their way through a rollout function.
# A group waits → is taken by a call → ends, once: with samples, given back, dropped or failed. One whose lease ends
# leaves wherever it is. The groups that wait, and how the ledger answered last, decide when a call begins and what it
# may take.

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


# One call of a rollout function: the groups that it has taken, and how each of them ends.
# consumes: orders of the call's data source; waits for: leased groups, and for verdicts on weights before it accepts
# samples; produces: the end of every group that was taken, at the latest when the call has ended.

_MOST_ASKED = 1 << 20


class StepCall:
    """States of a group in it: taken → ended."""

    def __init__(
        self, path: str, groups: LeasedGroups, samples: SampleCodec, weights: ServedWeights, activity: Activity
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
                    self._end(self._group(number), GroupFiltered(cut_text(reason), rewards))
                case messages.FailSamples(number, why):
                    self._fail(self._group(number), Failure("HOOK_INVALID", cut_text(why)))
        except (InvalidArgument, FailedPrecondition) as error:
            return messages.OrderRefused(error.message)
        return messages.OrderDone()

    def finish(self, report: RolloutReport) -> None:
        """Ends the groups that are left when the function has returned."""
        if self._held and report.num_ended:
            log.info("rollout_groups_not_returned", hook=self._path, groups=len(self._held))
            self._end_all(LeaseReturned(f"hook {self._path} did not return it"))
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
        self._end_all(LeaseReturned(why))

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
        self._end(group, LeaseReturned(f"hook {self._path} gave it back", begun))

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


@asynccontextmanager
async def data_source_of(call: StepCall, path: Path) -> AsyncIterator[None]:
    """Carries out orders that come to a socket at `path` while the block runs. Raises Unavailable without a socket.

    What a connection sends is bounded, decoded in a thread, and never unpickled; anything but an order ends it.
    """
    serving = set[asyncio.Task[Any]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            call.begin()
            while True:
                reply = await call.answer(await _next_order(reader))
                writer.write(await asyncio.to_thread(messages.packed, reply))
                await writer.drain()
        except Unreadable as error:
            log.warning("data_source_connection_refused", why=str(error))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the worker, or the call, has ended
        finally:
            serving.discard(task)
            writer.close()

    try:
        server = await asyncio.start_unix_server(serve, path)
    except OSError as error:
        raise Unavailable(f"no socket can be made at {path}: {error}: name a folder in TMPDIR") from error
    try:
        yield
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _next_order(reader: asyncio.StreamReader) -> messages.Order:
    (size,) = messages.HEADER.unpack(await reader.readexactly(messages.HEADER.size))
    if size > MAX_HOOK_ANSWER_BYTES:
        raise Unreadable(f"{size} bytes are more than the {MAX_HOOK_ANSWER_BYTES} that one group may have")
    order: messages.Order = await asyncio.to_thread(decode_as, messages.Order, await reader.readexactly(size))
    return order


# A rollout function as the producer's sampler: it is called for a step's groups, one call after another.
# consumes: leased groups of the producer; waits for: a step's worth of them, or fewer where the ledger lets out no
# more; produces: each group's samples, or how it ends without. States: built → started → closed.


class StepSampler:
    """Calls the function at `path` in one worker process, which lives on between calls.

    `next_step` is asked before each call, for its `rollout_id`.
    """

    def __init__(
        self,
        path: str,
        args: HookArgs,
        weights: ServedWeights,
        groups: LeasedGroups,
        params: SamplingParams,
        next_step: Callable[[], Awaitable[int]],
        *,
        groups_per_step: int,
        seconds: float,
        activity: Activity,
        warn: Callable[[str], None],
        ended: Callable[[str], None],
    ) -> None:
        self._path = path
        self._args = args
        self._weights = weights
        self.groups = groups
        self._params = params
        self._next_step = next_step
        self._groups_per_step = groups_per_step
        self._activity = activity
        self._ended = ended
        self._samples = SampleCodec(path, args, weights, warn)
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-rollout-", dir=folder_for_sockets())
        self._function = UserFunction(path, load_rollout, "rollout_function_path", seconds)
        self.in_flight = 0
        self._calling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ConfigError when the function cannot be loaded or takes other arguments."""
        await self._function.start()
        self._calling = asyncio.create_task(kept_running("call the rollout function", self._run, self._ended))

    async def close(self) -> None:
        """Ends the running call; its groups are given back."""
        if self._calling:
            self._calling.cancel()
            await asyncio.gather(self._calling, return_exceptions=True)
        await self._function.close()
        self._folder.cleanup()

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Waits until a call has ended the group. Raises LeaseReturned or GroupFiltered for one without samples.

        Raises Unavailable when weights were refused meanwhile: none of the samples may be stored.
        """
        self.in_flight += len(requests)
        try:
            return await self.groups.samples(requests)
        finally:
            self.in_flight -= len(requests)

    async def _run(self) -> None:
        while True:
            await self._step(await self.groups.enough(self._groups_per_step))

    async def _step(self, num_groups: int) -> None:
        rollout_id = await self._rollout_id()
        call = StepCall(self._path, self.groups, self._samples, self._weights, self._activity)
        path = Path(self._folder.name) / "data_source"
        work = (self._call_args(num_groups), rollout_id, self._params.for_engine(), str(path))
        log.info("rollout_function_called", hook=self._path, rollout_id=rollout_id, groups=num_groups)
        try:
            async with data_source_of(call, path):
                report = await self._function.call(run_rollout, *work)
            call.charge(num_groups)
            call.finish(report)
            log.info("rollout_function_returned", hook=self._path, rollout_id=rollout_id, metrics=report.metrics)
        except (WorkerError, HeadraceError) as error:
            call.charge(num_groups)
            call.fail(call_failure(error))
        finally:
            call.give_back("the call of the rollout function was ended")

    def _call_args(self, num_groups: int) -> HookArgs:
        """The job's options; the groups that the step still needs are the batch that the function is to return."""
        at_once = max(self._args.get("over_sampling_batch_size") or num_groups, num_groups)
        return HookArgs({**self._args, "rollout_batch_size": num_groups, "over_sampling_batch_size": at_once})

    async def _rollout_id(self) -> int:
        """The step that the ledger fills now; where it does not say, the version that is served."""
        try:
            return await self._next_step()
        except HeadraceError as error:
            log.warning("rollout_id_unknown", error=error.message)
            return self._weights.policy_version
