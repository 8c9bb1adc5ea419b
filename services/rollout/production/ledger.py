"""The buffer as producers use it: lease, renew, put, release."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Protocol

from headrace.api.buffer.v1 import buffer_pb2
from headrace.client.port import Buffer

STREAM = "train"
_WAIT_SECONDS = 5.0


class ProducerLedger(Protocol):
    """The buffer as producers use it."""

    async def lease(self, max_groups: int) -> buffer_pb2.LeaseGroupsResponse:
        """Waits some seconds for the first group; may return none."""

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        """Returns the ids of leases that have ended."""

    async def put(self, group: buffer_pb2.GroupPut) -> buffer_pb2.PutResult:
        """Ends a lease with a result."""

    async def release(self, releases: Sequence[buffer_pb2.LeaseRelease]) -> None:
        """Returns leases unfinished; their groups are queued again."""


class BufferLedger:
    """One stream of a buffer service."""

    def __init__(self, buffer: Buffer, stream: str, *, wait_seconds: float = _WAIT_SECONDS) -> None:
        self._buffer = buffer
        self._stream = stream
        self._producer_id = f"rollout-{uuid.uuid4().hex[:8]}"
        self._wait_seconds = wait_seconds
        self._oldest_version = 0

    async def lease(self, max_groups: int) -> buffer_pb2.LeaseGroupsResponse:
        """Waits some seconds for the first group; may return none."""
        answer = await self._buffer.lease_groups(
            self._stream,
            self._producer_id,
            max_groups,
            wait_seconds=self._wait_seconds,
            oldest_version=self._oldest_version,
        )
        self._oldest_version = answer.oldest_version
        return answer

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        """Returns the ids of leases that have ended."""
        return (await self._buffer.renew_leases(lease_ids)).lost

    async def put(self, group: buffer_pb2.GroupPut) -> buffer_pb2.PutResult:
        """Ends a lease with a result."""
        return (await self._buffer.put_groups([group]))[0]

    async def release(self, releases: Sequence[buffer_pb2.LeaseRelease]) -> None:
        """Returns leases unfinished; their groups are queued again."""
        await self._buffer.release_leases(releases)
