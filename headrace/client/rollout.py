"""The rollout service's client: one method for each call, with plain arguments, the server's errors and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2_grpc
from headrace.errors import DeadlineExceeded, HeadraceError, InvalidArgument, Unavailable
from headrace.publication import Probe
from headrace.rpc.client import DEFAULT_DEADLINE_SECONDS, Closing, Reply, call, call_once, connect, stream
from headrace.rpc.log import log
from headrace.rpc.retry import Backoff, retry_until
from headrace.trajectory import pack_column, unpack_column

Ask = Callable[[pb.GenerateRequest, float], AsyncGenerator[pb.GenerateResponse]]
"""(request, seconds until the deadline)."""

_NOT_CONTINUED = frozenset({"CANNOT_CONTINUE", "WEIGHTS_REFUSED"})
"""Reasons for which the tokens that are there are of no use."""


class _Responses:
    """Holds the tokens that came of each response to one request."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._num_responses = max(1, request.n)
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._ended: set[int] = set()

    @property
    def have_ended(self) -> bool:
        return len(self._ended) == self._num_responses

    @property
    def have_begun(self) -> bool:
        return bool(self._ended) or any(self._tokens.values())

    def left(self) -> Iterator[tuple[pb.GenerateRequest, int]]:
        """Yields each request to make now, and the index of its first response."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.return_tokens = True
        if not self.have_begun:
            yield request, 0
            return
        known = unpack_column(self._request.begun).tolist() if self._request.HasField("begun") else []
        for index in sorted(set(range(self._num_responses)) - self._ended):
            of_one = pb.GenerateRequest()
            of_one.CopyFrom(request)
            of_one.n = 1
            if index and of_one.sampling.HasField("seed"):
                of_one.sampling.seed += index
            of_one.begun.CopyFrom(pack_column("tokens", np.asarray([*known, *self._tokens[index]], dtype=np.int32)))
            yield of_one, index

    def add(self, reply: pb.GenerateResponse) -> pb.GenerateResponse:
        """The message as the reader asked for it."""
        if reply.HasField("tokens"):
            self._tokens[reply.index] += unpack_column(reply.tokens).tolist()
        if reply.status:
            self._ended.add(reply.index)
        if not self._request.return_tokens:
            reply.ClearField("tokens")
            reply.ClearField("log_probs")
        return reply


async def whole_response(
    request: pb.GenerateRequest, ask: Ask, *, deadline_seconds: float
) -> AsyncGenerator[pb.GenerateResponse]:
    """The messages of all of the request's responses, though a service may end meanwhile.

    Raises Unavailable at the deadline, and at once for a response that cannot be continued: one that follows a schema
    or a regular expression, once there is some of it.
    """
    end, backoff = time.monotonic() + deadline_seconds, Backoff()
    responses = _Responses(request)
    while not responses.have_ended:
        try:
            for asked, index in responses.left():
                replies = ask(asked, max(end - time.monotonic(), 0.0))
                async with contextlib.aclosing(replies):
                    async for reply in replies:
                        reply.index += index
                        backoff.reset()
                        yield responses.add(reply)
            if not responses.have_ended:
                raise Unavailable("the stream ended before its response: ask again")
        except Unavailable as error:
            if time.monotonic() >= end or not _may_go_on(request, responses, error):
                raise
            await backoff.sleep(error, at_most=end - time.monotonic())


def _may_go_on(request: pb.GenerateRequest, responses: _Responses, error: Unavailable) -> bool:
    if not responses.have_begun:
        return True
    is_constrained = bool(request.sampling.json_schema or request.sampling.regex)
    return not is_constrained and error.reason not in _NOT_CONTINUED


class EvaluationClient(Closing):
    """What a client of one rollout service and one of several have in common."""

    @abstractmethod
    def watch_evaluation(
        self,
        evaluation_id: str,
        datasets: Sequence[pb.EvalDataset],
        *,
        return_samples: bool = False,
        deadline_seconds: float = 3600.0,
    ) -> AsyncIterator[pb.EvaluateResponse]: ...

    async def evaluate(
        self,
        evaluation_id: str,
        datasets: Sequence[pb.EvalDataset],
        *,
        deadline_seconds: float = 3600.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Sequence[pb.EvalResult]:
        """One result for each data set. `progress` is called with (finished samples, all samples).

        It begins again where its service ends.
        """

        async def attempt(left: float) -> Sequence[pb.EvalResult]:
            results: Sequence[pb.EvalResult] = ()
            async for reply in self.watch_evaluation(evaluation_id, datasets, deadline_seconds=left):
                if progress:
                    progress(reply.done, reply.total)
                results = reply.results
            if not results:
                raise Unavailable(f"evaluation {evaluation_id} ended without results: ask again")
            return results

        return await retry_until(time.monotonic() + deadline_seconds, attempt)


class RolloutClient(EvaluationClient):
    """Speaks to one rollout service. Close it, or use it as a context."""

    def __init__(self, address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS, run: str = "") -> None:
        """`run`: the one that asks, where several share the service."""
        self.services = [self]
        self.address = address
        self._run = run
        self._channel = connect(address)
        self._peer = f"the rollout service at {address}"
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._deadline_seconds = deadline_seconds

    async def close(self) -> None:
        await self._channel.close(None)

    # Sampling and evaluating the policy

    async def generate(
        self, request: pb.GenerateRequest, *, deadline_seconds: float = 600.0
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yields text as it is generated; the last message has the status and the policy ranges.

        A response whose service ends goes on where it stopped, at the next that answers; its ranges are then those of
        the tokens after that.
        """
        replies = whole_response(request, self.begin_response, deadline_seconds=deadline_seconds)
        async with contextlib.aclosing(replies):
            async for reply in replies:
                yield reply

    async def begin_response(
        self, request: pb.GenerateRequest, deadline_seconds: float
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """One call of Generate, which ends with its service."""
        async for reply in stream(
            self._stub.Generate, self._named(request), deadline_seconds=deadline_seconds, peer=self._peer
        ):
            yield reply

    async def watch_evaluation(
        self,
        evaluation_id: str,
        datasets: Sequence[pb.EvalDataset],
        *,
        return_samples: bool = False,
        deadline_seconds: float = 3600.0,
    ) -> AsyncIterator[pb.EvaluateResponse]:
        """Yields progress, and the samples if requested; the last message has the results."""
        request = pb.EvaluateRequest(evaluation_id=evaluation_id, datasets=datasets, return_samples=return_samples)
        async for reply in stream(
            self._stub.Evaluate, self._named(request), deadline_seconds=deadline_seconds, peer=self._peer
        ):
            yield reply

    async def get_fleet(self, *, deadline_seconds: float | None = None) -> pb.GetFleetResponse:
        """State of the engines, the router and production."""
        return await self._call(self._stub.GetFleet, pb.GetFleetRequest(), deadline_seconds)

    async def scale_fleet(self, num_engines: int, *, drain_seconds: float | None = None) -> pb.ScaleFleetResponse:
        """Asks for a fleet of `num_engines`; `get_fleet` shows how they come and go.

        Raises FailedPrecondition for engines that are started elsewhere, InvalidArgument above the job's limit,
        ResourceExhausted where the machine's memory has no room for more.
        """
        request = pb.ScaleFleetRequest(num_engines=num_engines, drain_seconds=drain_seconds)
        return await self._call(self._stub.ScaleFleet, request)

    # New weights

    async def begin_publish(
        self, request: pb.BeginPublishRequest, *, deadline_seconds: float
    ) -> pb.BeginPublishResponse:
        """Opens a publication; the engines wait in the groups from now on. Raises FailedPrecondition, Fenced.

        A service that still starts its engines is waited for until the deadline.
        """
        return await self._call(self._stub.BeginPublish, request, deadline_seconds)

    async def publish_bucket(self, publication_id: str, bucket: int, *, deadline_seconds: float) -> Sequence[str]:
        """Returns the engines lost so far, once all others have the bucket. Raises PublicationAborted."""
        request = pb.PublishBucketRequest(publication_id=publication_id, bucket=bucket)
        reply = await self._call(self._stub.PublishBucket, request, deadline_seconds)
        return reply.lost_engine_ids

    async def commit_publish(
        self,
        publication_id: str,
        checksums: Mapping[str, str],
        *,
        probe: Probe | None = None,
        deadline_seconds: float,
    ) -> pb.CommitPublishResponse:
        """Commits the publication: from then on its version is served. Raises ChecksumMismatch, PublicationAborted."""
        expected = [pb.EngineChecksum(name=name, checksum=checksum) for name, checksum in checksums.items()]
        request = pb.CommitPublishRequest(
            publication_id=publication_id, engine_checksums=expected, probe=probe.pack() if probe else None
        )
        return await self._call(self._stub.CommitPublish, request, deadline_seconds)

    async def abort_publish(self, publication_id: str, reason: str) -> None:
        """Aborts the publication; does nothing when it has ended."""
        await self._call(self._stub.AbortPublish, pb.AbortPublishRequest(publication_id=publication_id, reason=reason))

    # Production

    async def pause_production(self) -> int:
        """Stops producers from leasing groups; returns the number of samples that still finish."""
        reply = await self._call(self._stub.PauseProduction, pb.PauseProductionRequest())
        return reply.samples_in_flight

    async def resume_production(self) -> None:
        """Lets producers lease groups again."""
        await self._call(self._stub.ResumeProduction, pb.ResumeProductionRequest())

    async def set_reward(self, *, address: str | None = None, scorer: str | None = None) -> pb.SetRewardResponse:
        """Changes the reward service or the scorer from the next sample on.

        None keeps the current one, and an empty scorer means the service's default.
        """
        return await self._call(self._stub.SetReward, pb.SetRewardRequest(address=address, scorer=scorer))

    # Devices that engines share with the trainer

    async def release_memory(self, epoch: int = 0, *, deadline_seconds: float) -> Sequence[str]:
        """Returns the engines that live on without memory, once none has any on a device. Raises Fenced."""
        request = pb.ReleaseMemoryRequest(epoch=epoch)
        reply = await self._call(self._stub.ReleaseMemory, request, deadline_seconds)
        return reply.engine_ids

    async def resume_memory(self, epoch: int, *, deadline_seconds: float) -> Sequence[str]:
        """Returns the engines that can take weights, once there is one. Raises Aborted where they were released."""
        request = pb.ResumeMemoryRequest(epoch=epoch)
        reply = await self._call(self._stub.ResumeMemory, request, deadline_seconds)
        return reply.engine_ids

    # Tasks of agents that are played elsewhere

    async def lease_tasks(
        self,
        host_id: str,
        max_tasks: int,
        *,
        wait_seconds: float = 0.0,
        return_args: bool = False,
        agent_function_path: str = "",
        deadline_seconds: float | None = None,
    ) -> pb.LeaseTasksResponse:
        """Tasks to play, none where the wait was over first. One call: the caller decides whether to ask again.

        Raises FailedPrecondition where the job lends none, Unavailable with reason SERVER_ENDS where the service ends,
        and DeadlineExceeded where it cannot be reached.
        """
        request = pb.LeaseTasksRequest(
            host_id=host_id,
            max_tasks=max_tasks,
            wait_seconds=wait_seconds,
            return_args=return_args,
            agent_function_path=agent_function_path,
        )
        seconds = deadline_seconds or self._deadline_seconds + wait_seconds
        return await call_once(self._stub.LeaseTasks, request, deadline_seconds=seconds, peer=self._peer)

    def is_connected(self) -> bool:
        """True while a connection to the service stands: a call that is not answered waits for its work then."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def renew_tasks(
        self, host_id: str, lease_ids: Sequence[str], *, deadline_seconds: float | None = None
    ) -> Sequence[str]:
        """Returns the leases that have ended: what is played under them counts for nothing."""
        request = pb.RenewTasksRequest(host_id=host_id, lease_ids=lease_ids)
        reply = await self._call(self._stub.RenewTasks, request, deadline_seconds)
        return reply.lost_lease_ids

    async def finish_task(self, request: pb.FinishTaskRequest, *, deadline_seconds: float | None = None) -> bool:
        """Ends a task, or returns it. False where its lease had ended before."""
        reply = await self._call(self._stub.FinishTask, request, deadline_seconds)
        return reply.accepted

    # Several runs on one service

    async def join_run(self, job_json: str, base_digest: str, *, deadline_seconds: float) -> float:
        """Joins, or renews the lease. Returns its seconds; 0 for the run that the service was started for, which stays.

        Raises FailedPrecondition, AlreadyExists or ResourceExhausted where the service cannot take the run.
        """
        request = pb.JoinRunRequest(run=self._run, job_json=job_json, base_digest=base_digest)
        reply = await call_once(self._stub.JoinRun, request, deadline_seconds=deadline_seconds, peer=self._peer)
        return reply.lease_seconds

    async def leave_run(self, *, deadline_seconds: float) -> None:
        """Returns once nothing of the run is left at the service."""
        request = pb.LeaveRunRequest(run=self._run)
        await call_once(self._stub.LeaveRun, request, deadline_seconds=deadline_seconds, peer=self._peer)

    def _named(self, request: Message) -> Message:
        if self._run and "run" in request.DESCRIPTOR.fields_by_name:
            request.run = self._run  # type: ignore[attr-defined]  # those messages have it
        return request

    async def _call(
        self, method: Callable[..., Awaitable[Reply]], request: Message, deadline_seconds: float | None = None
    ) -> Reply:
        request = self._named(request)
        return await call(method, request, deadline_seconds=deadline_seconds or self._deadline_seconds, peer=self._peer)


# Several rollout services on one ledger, asked as one.
#
# What one of them can do (a response, an evaluation) is done by the first that answers. The fleet is that of all
# services that answer; what changes production is done at all of them.

_ANSWER_SECONDS = 5.0
"""A service that does not say how its engines are within it is not asked for anything else."""

_Reply = TypeVar("_Reply")


def service_name(number: int) -> str:
    """The name of one of several rollout services: of its process, its log, and before its engines' names."""
    return f"rollout-{number}"


class RolloutClients(EvaluationClient):
    """All services of a run, in the order of their addresses."""

    def __init__(
        self, addresses: Sequence[str], *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS, run: str = ""
    ) -> None:
        if len(set(addresses)) != len(addresses):
            raise InvalidArgument(
                f"the rollout services {list(addresses)} have an address twice: give each service its own"
            )
        self.services = [RolloutClient(address, deadline_seconds=deadline_seconds, run=run) for address in addresses]
        self._deadline_seconds = deadline_seconds

    async def close(self) -> None:
        await asyncio.gather(*(service.close() for service in self.services))

    async def generate(
        self, request: pb.GenerateRequest, *, deadline_seconds: float = 600.0
    ) -> AsyncIterator[pb.GenerateResponse]:

        def ask(asked: pb.GenerateRequest, seconds: float) -> AsyncGenerator[pb.GenerateResponse]:
            return self._of_one(lambda service: service.begin_response(asked, seconds))

        replies = whole_response(request, ask, deadline_seconds=deadline_seconds)
        async with contextlib.aclosing(replies):
            async for reply in replies:
                yield reply

    async def watch_evaluation(
        self,
        evaluation_id: str,
        datasets: Sequence[pb.EvalDataset],
        *,
        return_samples: bool = False,
        deadline_seconds: float = 3600.0,
    ) -> AsyncIterator[pb.EvaluateResponse]:
        """One service evaluates. If it ends before its first message another does; later the caller asks again."""
        replies = self._of_one(
            lambda service: service.watch_evaluation(
                evaluation_id, datasets, return_samples=return_samples, deadline_seconds=deadline_seconds
            )
        )
        async with contextlib.aclosing(replies):
            async for reply in replies:
                yield reply

    async def get_fleet(self, *, deadline_seconds: float | None = None) -> pb.GetFleetResponse:
        """Merges the fleets of the services that answer; an engine's id has its service's name before it.

        The policy version is the newest: the services of an older one do not produce. Raises when none answers.
        """
        seconds = deadline_seconds or self._deadline_seconds
        asked = await self._tried(lambda service: service.get_fleet(deadline_seconds=seconds))
        fleets = {number: reply for number, reply in enumerate(asked) if isinstance(reply, pb.GetFleetResponse)}
        if not fleets:
            raise next(error for error in asked if isinstance(error, HeadraceError))
        return _merged(fleets, [number for number in range(len(asked)) if number not in fleets])

    async def pause_production(self) -> int:
        return sum(await self._all("production is paused", lambda service: service.pause_production()))

    async def resume_production(self) -> None:
        await self._all("production goes on", lambda service: service.resume_production())

    async def set_reward(self, *, address: str | None = None, scorer: str | None = None) -> pb.SetRewardResponse:
        """The answer is that of the service that changed last."""
        replies = await self._all("it is changed", lambda service: service.set_reward(address=address, scorer=scorer))
        return max(replies, key=lambda reply: reply.time.ToNanoseconds())

    async def _of_one(self, ask: Callable[[RolloutClient], AsyncIterator[_Reply]]) -> AsyncGenerator[_Reply]:
        """The messages of the first service that answers; a stream that has begun is not begun again elsewhere."""
        error: HeadraceError = Unavailable("no rollout service has a ready engine: see `headrace status`")
        for service in await self._ready():
            begun = False
            try:
                async for reply in ask(service):
                    begun = True
                    yield reply
            except (Unavailable, DeadlineExceeded) as failure:
                if begun:
                    raise
                log.warning("another_rollout_service_is_asked", instead_of=service.address, error=failure.message)
                error = failure
            else:
                return
        raise error

    async def _ready(self) -> Sequence[RolloutClient]:
        """Returns the services that answer, those of the newest version first, among them the least busy first."""
        asked = await self._tried(lambda service: service.get_fleet(deadline_seconds=_ANSWER_SECONDS))
        ready = [
            (-reply.policy_version, reply.samples_in_flight, number)
            for number, reply in enumerate(asked)
            if isinstance(reply, pb.GetFleetResponse)
            and any(engine.state == pb.ENGINE_STATE_READY for engine in reply.engines)
        ]
        return [self.services[number] for _, _, number in sorted(ready)]

    async def _all(self, done: str, ask: Callable[[RolloutClient], Awaitable[_Reply]]) -> Sequence[_Reply]:
        """Raises the error of a service that refused or does not answer, once all were asked."""
        asked = await self._tried(ask)
        replies = [reply for reply in asked if not isinstance(reply, HeadraceError)]
        for reply in asked:
            if isinstance(reply, Unavailable | DeadlineExceeded):
                raise Unavailable(
                    f"{reply.message}; {done} at {len(replies)} of {len(asked)} rollout services: repeat it when this "
                    "one is back"
                ) from reply
            if isinstance(reply, HeadraceError):
                raise reply
        return replies

    async def _tried(self, ask: Callable[[RolloutClient], Awaitable[_Reply]]) -> Sequence[_Reply | HeadraceError]:
        async def tried(service: RolloutClient) -> _Reply | HeadraceError:
            try:
                return await ask(service)
            except HeadraceError as error:
                return error

        return await asyncio.gather(*map(tried, self.services))


Rollout = RolloutClient | RolloutClients
"""Both have the same methods; `services` are the clients of each service, in the order of their addresses."""


def _merged(fleets: dict[int, pb.GetFleetResponse], silent: Sequence[int]) -> pb.GetFleetResponse:
    merged = pb.GetFleetResponse(
        policy_version=max(fleet.policy_version for fleet in fleets.values()),
        paused=all(fleet.paused for fleet in fleets.values()),
        samples_in_flight=sum(fleet.samples_in_flight for fleet in fleets.values()),
        samples_being_scored=sum(fleet.samples_being_scored for fleet in fleets.values()),
        groups_produced=sum(fleet.groups_produced for fleet in fleets.values()),
        tokens_produced=sum(fleet.tokens_produced for fleet in fleets.values()),
        publication_id=next((fleet.publication_id for fleet in fleets.values() if fleet.publication_id), ""),
        router_address=",".join(fleet.router_address for fleet in fleets.values()),
        reward_address=",".join(dict.fromkeys(fleet.reward_address for fleet in fleets.values())),
        scorer=",".join(dict.fromkeys(fleet.scorer for fleet in fleets.values())),
        runs=[run for fleet in fleets.values() for run in fleet.runs],
        warnings=dict.fromkeys(warning for fleet in fleets.values() for warning in fleet.warnings),
    )
    for number, fleet in fleets.items():
        for engine in fleet.engines:
            engine.engine_id = f"{service_name(number)}/{engine.engine_id}"
            merged.engines.append(engine)
    merged.warnings.extend(f"{service_name(number)} does not answer" for number in silent)
    return merged
