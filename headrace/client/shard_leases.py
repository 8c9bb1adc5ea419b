"""Leases from all shards of a buffer, as evenly as they have groups; a shard that does not answer is skipped."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Sequence
from itertools import count

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.client.shard_answers import merged_leases
from headrace.client.shard_routing import answers_that_came
from headrace.client.shared_waits import SharedWaits

_DEADLINE_SECONDS = 2.0
_POLL_SECONDS = 0.25


class ShardLeases:
    """Asks every shard again and again while nothing is there; of those who wait for the same only some do that."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.clients = [BufferClient(address, deadline_seconds=_DEADLINE_SECONDS) for address in addresses]
        self._unanswered: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        """(stream, shard) → requests that may have been granted without our hearing of it."""
        self._turn = 0
        self._waits = SharedWaits()

    async def lease(
        self,
        stream: str,
        producer_id: str,
        max_groups: int,
        wait_seconds: float,
        request_id: str | None,
        oldest_version: int | None,
    ) -> pb.LeaseGroupsResponse:
        """See `BufferClient.lease_groups`."""

        async def ask(seconds: float, _: float) -> pb.LeaseGroupsResponse:
            loop = asyncio.get_running_loop()
            end = loop.time() + seconds
            for attempt in count():
                merged = await self._lease_once(stream, producer_id, max_groups, request_id or uuid.uuid4().hex)
                left = end - loop.time()
                if (
                    left <= 0
                    or merged.leases
                    or (oldest_version is not None and merged.oldest_version > oldest_version)
                ):
                    return merged
                await asyncio.sleep(min(left, _POLL_SECONDS * min(attempt + 1, 4)))
            raise AssertionError  # count() does not end

        awaited = (stream, oldest_version) if request_id is None else request_id
        return await self._waits.ask(awaited, ask, wait_seconds, _DEADLINE_SECONDS)

    async def _lease_once(
        self, stream: str, producer_id: str, max_groups: int, request_id: str
    ) -> pb.LeaseGroupsResponse:
        """Asks every shard for its even share; a different shard gets the remainder each time."""
        num_shards, self._turn = len(self.clients), self._turn + 1

        async def lease(k: int) -> pb.LeaseGroupsResponse:
            share = (max_groups + (k + self._turn) % num_shards) // num_shards
            if not share:
                return pb.LeaseGroupsResponse()
            return await self._lease_from(k, stream, producer_id, share, f"{request_id}/{k}")

        found = await asyncio.gather(*(lease(k) for k in range(num_shards)), return_exceptions=True)
        return merged_leases(answers_that_came(found, least=1), num_shards)

    async def _lease_from(
        self, k: int, stream: str, producer_id: str, share: int, request_id: str
    ) -> pb.LeaseGroupsResponse:
        """Repeats an unanswered request before a new one is sent, because it may have been granted."""
        unanswered = self._unanswered[stream, k]
        request = unanswered.pop() if unanswered else request_id
        try:
            return await self.clients[k].lease_groups(stream, producer_id, share, request_id=request)
        except BaseException:
            unanswered.append(request)
            raise
