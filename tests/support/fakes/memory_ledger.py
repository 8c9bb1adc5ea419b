"""A ledger that hands out what it was given, and remembers what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from services.rollout.production.producer import BufferLedger


class MemoryLedger(BufferLedger):
    """Without a buffer."""

    def __init__(self, leases: Sequence[buffer_pb2.GroupLease] = ()) -> None:
        self.queued = list(leases)
        self.puts: list[buffer_pb2.GroupPut] = []
        self.released: list[str] = []
        self.releases: list[buffer_pb2.LeaseRelease] = []
        self.renewed: list[str] = []
        self.lost: set[str] = set()
        self.oldest_version = 0

    async def lease(self, max_groups: int) -> buffer_pb2.LeaseGroupsResponse:
        taken, self.queued = self.queued[:max_groups], self.queued[max_groups:]
        if not taken:
            await asyncio.sleep(0.01)  # the real one waits for admission
        return buffer_pb2.LeaseGroupsResponse(leases=taken, oldest_version=self.oldest_version)

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        self.renewed += lease_ids
        return [lease_id for lease_id in lease_ids if lease_id in self.lost]

    async def put(self, group: buffer_pb2.GroupPut) -> buffer_pb2.PutResult:
        self.puts.append(group)
        return buffer_pb2.PutResult(group_id=group.group_id, state=buffer_pb2.GROUP_STATE_READY)

    async def release(self, releases: Sequence[buffer_pb2.LeaseRelease]) -> None:
        self.releases += releases
        self.released += [release.lease_id for release in releases]


def lease(number: int, *, text: str = "hello", policy_version: int = 0, seconds: float = 60.0) -> buffer_pb2.GroupLease:
    return buffer_pb2.GroupLease(
        lease_id=f"lease-{number}",
        group_id=f"group-{number}",
        prompt=sample_pb2.Prompt(prompt_id=f"prompt-{number}", text=text, label="7", metadata_json='{"n":1}'),
        n_samples=3,
        attempt=1,
        lease_seconds=seconds,
        policy_version=policy_version,
    )
