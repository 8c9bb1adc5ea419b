"""The rollout service's client: one method for each call, with plain arguments, the server's errors and deadlines.

`Rollout` is what one service and several (`rollouts`) have in common; publications are each service's own.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2_grpc
from headrace.client.closing import Closing
from headrace.client.resumed.response import whole_response
from headrace.errors import Unavailable
from headrace.probe import Probe
from headrace.rpc.call import DEFAULT_DEADLINE_SECONDS, call, call_once, stream
from headrace.rpc.channel import connect
from headrace.rpc.retry import retry_until


class Rollout(Closing):
    """The rollout services of a run: one, or several that are asked as one."""

    services: Sequence[RolloutClient]
    """Each service by itself, in the order of their addresses."""

    @abstractmethod
    def generate(
        self, request: pb.GenerateRequest, *, deadline_seconds: float = 600.0
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yields text as it is generated; the last message has the status and the policy ranges.

        A response whose service ends goes on where it stopped, at the next that answers; its ranges are then those of
        the tokens after that.
        """

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

    @abstractmethod
    def watch_evaluation(
        self,
        evaluation_id: str,
        datasets: Sequence[pb.EvalDataset],
        *,
        return_samples: bool = False,
        deadline_seconds: float = 3600.0,
    ) -> AsyncIterator[pb.EvaluateResponse]:
        """Yields progress, and the samples if requested; the last message has the results."""

    @abstractmethod
    async def get_fleet(self, *, deadline_seconds: float | None = None) -> pb.GetFleetResponse:
        """State of the engines, the router and production."""

    @abstractmethod
    async def pause_production(self) -> int:
        """Stops producers from leasing groups; returns the number of samples that still finish."""

    @abstractmethod
    async def resume_production(self) -> None:
        """Lets producers lease groups again."""

    @abstractmethod
    async def set_reward(self, *, address: str | None = None, scorer: str | None = None) -> pb.SetRewardResponse:
        """Changes the reward service or the scorer from the next sample on.

        None keeps the current one, and an empty scorer means the service's default.
        """


class RolloutClient(Rollout):
    """Speaks to one rollout service. Close it, or use it as a context."""

    def __init__(self, address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> None:
        self.services = [self]
        self.address = address
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
        replies = whole_response(request, self.begin_response, deadline_seconds=deadline_seconds)
        async with contextlib.aclosing(replies):
            async for reply in replies:
                yield reply

    async def begin_response(
        self, request: pb.GenerateRequest, deadline_seconds: float
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """One call of Generate, which ends with its service."""
        async for reply in stream(self._stub.Generate, request, deadline_seconds=deadline_seconds, peer=self._peer):
            yield reply

    async def watch_evaluation(
        self,
        evaluation_id: str,
        datasets: Sequence[pb.EvalDataset],
        *,
        return_samples: bool = False,
        deadline_seconds: float = 3600.0,
    ) -> AsyncIterator[pb.EvaluateResponse]:
        request = pb.EvaluateRequest(evaluation_id=evaluation_id, datasets=datasets, return_samples=return_samples)
        async for reply in stream(self._stub.Evaluate, request, deadline_seconds=deadline_seconds, peer=self._peer):
            yield reply

    async def get_fleet(self, *, deadline_seconds: float | None = None) -> pb.GetFleetResponse:
        reply: pb.GetFleetResponse = await self._call(self._stub.GetFleet, pb.GetFleetRequest(), deadline_seconds)
        return reply

    async def scale_fleet(self, num_engines: int, *, drain_seconds: float | None = None) -> pb.ScaleFleetResponse:
        """Asks for a fleet of `num_engines`; `get_fleet` shows how they come and go.

        Raises FailedPrecondition for engines that are started elsewhere, InvalidArgument above the job's limit,
        ResourceExhausted where the machine's memory has no room for more.
        """
        request = pb.ScaleFleetRequest(num_engines=num_engines, drain_seconds=drain_seconds)
        reply: pb.ScaleFleetResponse = await self._call(self._stub.ScaleFleet, request)
        return reply

    # New weights

    async def begin_publish(
        self, request: pb.BeginPublishRequest, *, deadline_seconds: float
    ) -> pb.BeginPublishResponse:
        """Opens a publication; the engines wait in the groups from now on. Raises FailedPrecondition, Fenced.

        A service that still starts its engines is waited for until the deadline.
        """
        reply: pb.BeginPublishResponse = await self._call(self._stub.BeginPublish, request, deadline_seconds)
        return reply

    async def publish_bucket(self, publication_id: str, bucket: int, *, deadline_seconds: float) -> Sequence[str]:
        """Returns the engines lost so far, once all others have the bucket. Raises PublicationAborted."""
        request = pb.PublishBucketRequest(publication_id=publication_id, bucket=bucket)
        reply: pb.PublishBucketResponse = await self._call(self._stub.PublishBucket, request, deadline_seconds)
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
        reply: pb.CommitPublishResponse = await self._call(self._stub.CommitPublish, request, deadline_seconds)
        return reply

    async def abort_publish(self, publication_id: str, reason: str) -> None:
        """Aborts the publication; does nothing when it has ended."""
        await self._call(self._stub.AbortPublish, pb.AbortPublishRequest(publication_id=publication_id, reason=reason))

    # Production

    async def pause_production(self) -> int:
        reply: pb.PauseProductionResponse = await self._call(self._stub.PauseProduction, pb.PauseProductionRequest())
        return reply.samples_in_flight

    async def resume_production(self) -> None:
        await self._call(self._stub.ResumeProduction, pb.ResumeProductionRequest())

    async def set_reward(self, *, address: str | None = None, scorer: str | None = None) -> pb.SetRewardResponse:
        reply: pb.SetRewardResponse = await self._call(
            self._stub.SetReward, pb.SetRewardRequest(address=address, scorer=scorer)
        )
        return reply

    # Devices that engines share with the trainer

    async def release_memory(self, epoch: int = 0, *, deadline_seconds: float) -> Sequence[str]:
        """Returns the engines that live on without memory, once none has any on a device. Raises Fenced."""
        request = pb.ReleaseMemoryRequest(epoch=epoch)
        reply: pb.ReleaseMemoryResponse = await self._call(self._stub.ReleaseMemory, request, deadline_seconds)
        return reply.engine_ids

    async def resume_memory(self, epoch: int, *, deadline_seconds: float) -> Sequence[str]:
        """Returns the engines that can take weights, once there is one. Raises Aborted where they were released."""
        request = pb.ResumeMemoryRequest(epoch=epoch)
        reply: pb.ResumeMemoryResponse = await self._call(self._stub.ResumeMemory, request, deadline_seconds)
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
        reply: pb.LeaseTasksResponse = await call_once(
            self._stub.LeaseTasks, request, deadline_seconds=seconds, peer=self._peer
        )
        return reply

    def is_connected(self) -> bool:
        """True while a connection to the service stands: a call that is not answered waits for its work then."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def renew_tasks(
        self, host_id: str, lease_ids: Sequence[str], *, deadline_seconds: float | None = None
    ) -> Sequence[str]:
        """Returns the leases that have ended: what is played under them counts for nothing."""
        request = pb.RenewTasksRequest(host_id=host_id, lease_ids=lease_ids)
        reply: pb.RenewTasksResponse = await self._call(self._stub.RenewTasks, request, deadline_seconds)
        return reply.lost_lease_ids

    async def finish_task(self, request: pb.FinishTaskRequest, *, deadline_seconds: float | None = None) -> bool:
        """Ends a task, or returns it. False where its lease had ended before."""
        reply: pb.FinishTaskResponse = await self._call(self._stub.FinishTask, request, deadline_seconds)
        return reply.accepted

    async def _call(self, method: Any, request: Message, deadline_seconds: float | None = None) -> Any:
        return await call(method, request, deadline_seconds=deadline_seconds or self._deadline_seconds, peer=self._peer)
