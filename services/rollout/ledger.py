"""The producers' side of the buffer: lease, renew, put, release."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Protocol

from headrace.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from headrace.rpc.call import call
from headrace.rpc.channel import connect

_WAIT_SECONDS = 5.0
_CALL_SECONDS = 60.0


class Ledger(Protocol):
    """What a producer needs of the buffer."""

    async def lease(self, max_groups: int) -> Sequence[buffer_pb2.GroupLease]:
        """Waits some seconds for the first; may answer none."""

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        """Answers those that were lost."""

    async def put(self, group: buffer_pb2.GroupPut) -> buffer_pb2.PutResult:
        """Ends a lease."""

    async def release(self, lease_ids: Sequence[str], why: str) -> None:
        """Gives leases back; the groups are queued again."""


class BufferLedger:
    """One stream of a buffer service."""

    def __init__(self, address: str, stream: str) -> None:
        self._channel = connect(address)
        self._stub = buffer_pb2_grpc.BufferServiceStub(self._channel)
        self._stream = stream
        self._producer_id = f"rollout-{uuid.uuid4().hex[:8]}"

    async def lease(self, max_groups: int) -> Sequence[buffer_pb2.GroupLease]:
        """Waits some seconds for the first; may answer none."""
        request = buffer_pb2.LeaseGroupsRequest(
            stream=self._stream,
            producer_id=self._producer_id,
            request_id=uuid.uuid4().hex,
            max_groups=max_groups,
            wait_seconds=_WAIT_SECONDS,
        )
        reply: buffer_pb2.LeaseGroupsResponse = await call(
            self._stub.LeaseGroups, request, deadline_seconds=_WAIT_SECONDS + _CALL_SECONDS
        )
        return reply.leases

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        """Answers those that were lost."""
        request = buffer_pb2.RenewLeasesRequest(lease_ids=lease_ids)
        reply: buffer_pb2.RenewLeasesResponse = await call(
            self._stub.RenewLeases, request, deadline_seconds=_CALL_SECONDS
        )
        return reply.lost

    async def put(self, group: buffer_pb2.GroupPut) -> buffer_pb2.PutResult:
        """Ends a lease."""
        request = buffer_pb2.PutGroupsRequest(groups=[group])
        reply: buffer_pb2.PutGroupsResponse = await call(
            self._stub.PutGroups, request, deadline_seconds=_CALL_SECONDS
        )
        return reply.results[0]

    async def release(self, lease_ids: Sequence[str], why: str) -> None:
        """Gives leases back; the groups are queued again."""
        releases = [buffer_pb2.LeaseRelease(lease_id=lease_id, reason=why) for lease_id in lease_ids]
        request = buffer_pb2.ReleaseLeasesRequest(releases=releases)
        await call(self._stub.ReleaseLeases, request, deadline_seconds=_WAIT_SECONDS)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()
