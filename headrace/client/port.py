"""The interface that callers use for the ledger, with one buffer or several shards behind it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.closing import Closing
from headrace.errors import DeadlineExceeded
from headrace.rpc.call import DEFAULT_DEADLINE_SECONDS

__all__ = ["DEFAULT_DEADLINE_SECONDS", "PROGRESS_SECONDS", "Buffer"]

PROGRESS_SECONDS = 2.0


class Buffer(Closing):
    """`BufferClient` says what each method does; both implementations keep the same contract tests.

    Close it, or use it as a context.
    """

    @abstractmethod
    async def create_stream(self, config: pb.StreamConfig) -> pb.CreateStreamResponse: ...

    @abstractmethod
    async def delete_stream(self, stream: str, *, force: bool = False) -> bool: ...

    @abstractmethod
    async def list_streams(self) -> Sequence[pb.StreamConfig]: ...

    @abstractmethod
    async def submit_prompts(self, stream: str, prompts: Sequence[sample_pb2.Prompt]) -> Sequence[str]: ...

    @abstractmethod
    async def lease_groups(
        self,
        stream: str,
        producer_id: str,
        max_groups: int,
        *,
        wait_seconds: float = 0.0,
        request_id: str | None = None,
        oldest_version: int | None = None,
    ) -> pb.LeaseGroupsResponse: ...

    @abstractmethod
    async def renew_leases(self, lease_ids: Sequence[str]) -> pb.RenewLeasesResponse: ...

    @abstractmethod
    async def release_leases(self, releases: Sequence[pb.LeaseRelease]) -> None: ...

    @abstractmethod
    async def put_groups(self, puts: Sequence[pb.GroupPut]) -> Sequence[pb.PutResult]: ...

    @abstractmethod
    async def retry_groups(
        self, stream: str, group_ids: Sequence[str] = (), *, request_id: str | None = None
    ) -> pb.RetryGroupsResponse: ...

    @abstractmethod
    async def drop_groups(
        self, stream: str, group_ids: Sequence[str], reason: str, *, request_id: str | None = None
    ) -> pb.DropGroupsResponse: ...

    @abstractmethod
    async def rewind(self, stream: str, step: int, *, request_id: str | None = None) -> pb.RewindResponse: ...

    @abstractmethod
    async def try_lease_batch(
        self, stream: str, epoch: int, step: int, *, wait_seconds: float = 0.0
    ) -> pb.LeaseBatchResponse: ...

    @abstractmethod
    async def fetch_samples(
        self, stream: str, sample_ids: Sequence[str], *, deadline_seconds: float | None = None
    ) -> list[sample_pb2.Sample]: ...

    @abstractmethod
    async def consume(self, stream: str, epoch: int, step: int, digest: bytes) -> int: ...

    @abstractmethod
    async def commit(self, stream: str, epoch: int, step: int) -> int: ...

    @abstractmethod
    async def set_policy_version(self, stream: str, epoch: int, policy_version: int) -> int: ...

    @abstractmethod
    def watch(
        self, stream: str, from_position: int = 0, *, deadline_seconds: float | None = None
    ) -> AsyncIterator[pb.LedgerEvent]: ...

    @abstractmethod
    async def list_groups(
        self,
        stream: str,
        states: Sequence[pb.GroupState.ValueType] = (),
        *,
        page_size: int = 0,
        page_token: str = "",
        group_ids: Sequence[str] = (),
    ) -> pb.ListGroupsResponse: ...

    @abstractmethod
    async def stats(self, stream: str) -> pb.StreamStats: ...

    @abstractmethod
    async def damage(self) -> Sequence[pb.Damage]: ...

    async def lease_batch(
        self,
        stream: str,
        epoch: int,
        step: int,
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[[int], None] | None = None,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> pb.LeaseBatchResponse:
        """Waits until the batch is full. `on_progress` gets the number of READY groups every `progress_seconds`."""
        loop = asyncio.get_running_loop()
        end = None if timeout_seconds is None else loop.time() + timeout_seconds
        while True:
            left = progress_seconds if end is None else max(min(progress_seconds, end - loop.time()), 0.0)
            reply = await self.try_lease_batch(stream, epoch, step, wait_seconds=left)
            if reply.ready:
                return reply
            if on_progress:
                on_progress(reply.groups_ready)
            if end is not None and loop.time() >= end:
                raise DeadlineExceeded(
                    f"step {step} of {stream} has {reply.groups_ready} groups ready after {timeout_seconds:g} s, "
                    "too few for a batch: check that producers run"
                )
