"""One ledger in several buffers: shard k of N has every group whose number is k modulo N.

Every shard has its own producers' share, batches, journal and disk. A step's batch is the shards' batches one after the
other, so it is as deterministic as they are, and shards need not agree on anything. The groups of a shard that is down
wait until it is back: leases come from the other shards, and a batch waits for all of them.
Positions of the history belong to a shard: `watch` can be read from the beginning only; `shards` are for resuming.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.client.port import DEFAULT_DEADLINE_SECONDS, Buffer
from headrace.client.shard_answers import (
    StatsMerger,
    batch_digest,
    merged_batch,
    merged_config,
    share_of,
)
from headrace.client.shard_leases import ShardLeases
from headrace.client.shard_routing import answers_that_came, group_of_lease, grouped, shard_of_group, shard_of_prompt
from headrace.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable

_Answer = TypeVar("_Answer")
_MAX_REWINDS = 8


class ShardedBuffer(Buffer):
    """`BufferClient`'s methods over all shards, in the order of their addresses, which must never change."""

    def __init__(self, addresses: Sequence[str], *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> None:
        if len(set(addresses)) != len(addresses):
            raise InvalidArgument(f"the shards {list(addresses)} have an address twice: give each shard its own")
        self.shards = [BufferClient(address, deadline_seconds=deadline_seconds) for address in addresses]
        self._leases = ShardLeases(addresses)
        self._stats = StatsMerger()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in (*self.shards, *self._leases.clients)))

    # Streams and prompts

    async def create_stream(self, config: pb.StreamConfig) -> pb.CreateStreamResponse:
        """Every shard gets its share of the stream's counts and limits."""
        replies = await self._all(lambda k, shard: shard.create_stream(share_of(config, k, len(self.shards))))
        created = any(reply.created for reply in replies)
        return pb.CreateStreamResponse(config=merged_config([r.config for r in replies]), created=created)

    async def delete_stream(self, stream: str, *, force: bool = False) -> bool:
        """Deletes the stream on every shard. Raises when one of them refuses."""
        return any(await self._all(lambda _, shard: shard.delete_stream(stream, force=force)))

    async def list_streams(self) -> Sequence[pb.StreamConfig]:
        """Configs with the shards' shares added up, ordered by name."""
        by_name: dict[str, list[pb.StreamConfig]] = {}
        for configs in await self._all(lambda _, shard: shard.list_streams()):
            for config in configs:
                by_name.setdefault(config.name, []).append(config)
        return [merged_config(configs) for _, configs in sorted(by_name.items())]

    async def submit_prompts(self, stream: str, prompts: Sequence[sample_pb2.Prompt]) -> Sequence[str]:
        """A prompt's id chooses its shard. Each shard's part is stored whole or not at all."""

        async def submit(k: int, some: Sequence[sample_pb2.Prompt]) -> Sequence[str]:
            return await self.shards[k].submit_prompts(stream, some)

        return await self._routed(prompts, lambda prompt: shard_of_prompt(prompt, len(self.shards)), submit)

    # Producers

    async def lease_groups(
        self,
        stream: str,
        producer_id: str,
        max_groups: int,
        *,
        wait_seconds: float = 0.0,
        request_id: str | None = None,
        oldest_version: int | None = None,
    ) -> pb.LeaseGroupsResponse:
        """Leases from all shards as evenly as they have groups, and skips a shard that does not answer."""
        return await self._leases.lease(stream, producer_id, max_groups, wait_seconds, request_id, oldest_version)

    async def renew_leases(self, lease_ids: Sequence[str]) -> pb.RenewLeasesResponse:
        """Leases of a shard that is down are in neither list: they get their full time when it is back."""
        parts = self._parts(lease_ids, group_of_lease)
        found = await asyncio.gather(
            *(self._leases.clients[k].renew_leases([lease_ids[i] for i in part]) for k, part in parts.items()),
            return_exceptions=True,
        )
        merged = pb.RenewLeasesResponse()
        for reply in answers_that_came(found, least=1):
            merged.renewed.extend(reply.renewed)
            merged.lost.extend(reply.lost)
        return merged

    async def release_leases(self, releases: Sequence[pb.LeaseRelease]) -> None:
        parts = self._parts(releases, lambda release: group_of_lease(release.lease_id))
        await asyncio.gather(*(self.shards[k].release_leases([releases[i] for i in part]) for k, part in parts.items()))

    async def put_groups(self, puts: Sequence[pb.GroupPut]) -> Sequence[pb.PutResult]:
        """Each shard's part is stored whole or not at all; a repeated put is a duplicate where it was stored."""

        async def put(k: int, some: Sequence[pb.GroupPut]) -> Sequence[pb.PutResult]:
            return await self.shards[k].put_groups(some)

        return await self._routed(puts, lambda one: self._shard_of(one.group_id), put)

    async def retry_groups(
        self, stream: str, group_ids: Sequence[str] = (), *, request_id: str | None = None
    ) -> pb.RetryGroupsResponse:
        """Each shard's part is queued again whole or not at all; without ids every shard retries."""
        request, parts = request_id or uuid.uuid4().hex, self._parts(group_ids, lambda group_id: group_id)
        asked = parts if group_ids else dict.fromkeys(range(len(self.shards)), ())
        replies = await asyncio.gather(
            *(
                self.shards[k].retry_groups(stream, [group_ids[i] for i in part], request_id=request)
                for k, part in asked.items()
            )
        )
        return pb.RetryGroupsResponse(
            num_groups=sum(reply.num_groups for reply in replies), num_failed=sum(reply.num_failed for reply in replies)
        )

    async def drop_groups(
        self, stream: str, group_ids: Sequence[str], reason: str, *, request_id: str | None = None
    ) -> pb.DropGroupsResponse:
        """Each shard's part is dropped whole or not at all."""
        request, parts = request_id or uuid.uuid4().hex, self._parts(group_ids, lambda group_id: group_id)
        replies = await asyncio.gather(
            *(
                self.shards[k].drop_groups(stream, [group_ids[i] for i in part], reason, request_id=request)
                for k, part in parts.items()
            )
        )
        return pb.DropGroupsResponse(
            num_groups=sum(reply.num_groups for reply in replies),
            num_batches=sum(reply.num_batches for reply in replies),
        )

    # The trainer

    async def rewind(self, stream: str, step: int, *, request_id: str | None = None) -> pb.RewindResponse:
        """Opens one epoch for all shards. When they differ, because a rewind was interrupted, it opens a higher one."""
        request, least, num_groups = request_id or uuid.uuid4().hex, 0, 0
        for attempt in range(_MAX_REWINDS):
            replies = await self._rewind(stream, step, f"{request}/{attempt}", least)
            epochs = [reply.epoch for reply in replies]
            num_groups += sum(reply.num_groups for reply in replies)
            if len(set(epochs)) == 1:
                return pb.RewindResponse(epoch=epochs[0], num_groups=num_groups)
            least = max(epochs) + 1
        raise Unavailable(f"other trainers rewind {stream} at the same time: start one trainer only")

    async def _rewind(self, stream: str, step: int, request_id: str, least: int) -> Sequence[pb.RewindResponse]:
        return await self._all(lambda _, shard: shard.rewind(stream, step, request_id=request_id, least_epoch=least))

    async def try_lease_batch(
        self, stream: str, epoch: int, step: int, *, wait_seconds: float = 0.0
    ) -> pb.LeaseBatchResponse:
        """Ready when every shard's part is."""
        return merged_batch(
            await self._all(lambda _, shard: shard.try_lease_batch(stream, epoch, step, wait_seconds=wait_seconds))
        )

    async def fetch_samples(
        self, stream: str, sample_ids: Sequence[str], *, deadline_seconds: float | None = None
    ) -> list[sample_pb2.Sample]:
        """Asks every shard for all samples; each returns those that it has."""
        parts = await self._all(
            lambda _, shard: shard.fetch_samples(
                stream, sample_ids, deadline_seconds=deadline_seconds, skip_unknown=True
            )
        )
        found = {sample.envelope.sample_id: sample for part in parts for sample in part}
        if gone := [sample_id for sample_id in sample_ids if sample_id not in found]:
            raise NotFound(f"stream {stream} has no payload of the samples {gone}: never put, expired or committed")
        return [found[sample_id] for sample_id in sample_ids]

    async def consume(self, stream: str, epoch: int, step: int, digest: bytes) -> int:
        """`digest` covers the whole batch; every shard gets the digest of its own part."""
        parts = await self._all(lambda _, shard: shard.try_lease_batch(stream, epoch, step))
        if not all(part.ready for part in parts):
            raise FailedPrecondition(f"step {step} of {stream} has no batch yet: call lease_batch first")
        if batch_digest(parts) != digest:
            raise FailedPrecondition(
                f"step {step} of {stream} has the batch {batch_digest(parts).hex()[:16]}…, not {digest.hex()[:16]}…: "
                "train on what lease_batch returned",
                reason="OTHER_BATCH",
            )
        steps = await self._all(lambda k, shard: shard.consume(stream, epoch, step, parts[k].digest))
        return min(steps)

    async def commit(self, stream: str, epoch: int, step: int) -> int:
        """Returns the groups committed on all shards."""
        return sum(await self._all(lambda _, shard: shard.commit(stream, epoch, step)))

    async def set_policy_version(self, stream: str, epoch: int, policy_version: int) -> int:
        """Returns the groups that expired on all shards."""
        return sum(await self._all(lambda _, shard: shard.set_policy_version(stream, epoch, policy_version)))

    # Readers

    async def watch(
        self, stream: str, from_position: int = 0, *, deadline_seconds: float | None = None
    ) -> AsyncIterator[pb.LedgerEvent]:
        """Merges all shards' histories in the order of arrival. `position` is the shard's own."""
        if from_position > 1:
            raise InvalidArgument(
                f"position {from_position} belongs to one shard: watch that one of `shards` from there, or all from 0"
            )
        events: asyncio.Queue[pb.LedgerEvent] = asyncio.Queue(maxsize=1_000)

        async def read(shard: BufferClient) -> None:
            async for event in shard.watch(stream, from_position, deadline_seconds=deadline_seconds):
                await events.put(event)

        readers = [asyncio.create_task(read(shard)) for shard in self.shards]
        try:
            while True:
                event = asyncio.create_task(events.get())
                await asyncio.wait({event, *readers}, return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    next(reader for reader in readers if reader.done()).result()
                    return
                yield event.result()
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def list_groups(
        self,
        stream: str,
        states: Sequence[pb.GroupState.ValueType] = (),
        *,
        page_size: int = 0,
        page_token: str = "",
        group_ids: Sequence[str] = (),
    ) -> pb.ListGroupsResponse:
        """Pages through one shard after the other; newest change first within a shard."""
        if group_ids:
            parts = self._parts(group_ids, lambda group_id: group_id)
            replies = [
                await self.shards[k].list_groups(stream, states, group_ids=[group_ids[i] for i in part])
                for k, part in parts.items()
            ]
            return pb.ListGroupsResponse(groups=[group for reply in replies for group in reply.groups])
        k, _, token = page_token.partition(":")
        at = int(k or 0)
        page = await self.shards[at].list_groups(stream, states, page_size=page_size, page_token=token)
        if page.next_page_token:
            page.next_page_token = f"{at}:{page.next_page_token}"
        elif at + 1 < len(self.shards):
            page.next_page_token = f"{at + 1}:"
        return page

    async def stats(self, stream: str) -> pb.StreamStats:
        """Adds the counts; positions are the lowest of all shards."""
        return self._stats.merged(await self._all(lambda _, shard: shard.stats(stream)))

    async def damage(self) -> Sequence[pb.Damage]:
        """The damage of all shards."""
        return [one for found in await self._all(lambda _, shard: shard.damage()) for one in found]

    # Routing

    async def _all(self, ask: Callable[[int, BufferClient], Awaitable[_Answer]]) -> list[_Answer]:
        return await asyncio.gather(*(ask(k, shard) for k, shard in enumerate(self.shards)))

    def _shard_of(self, group_id: str) -> int:
        return shard_of_group(group_id, len(self.shards))

    def _parts(self, items: Sequence[Any], group_of: Callable[[Any], str]) -> Mapping[int, list[int]]:
        """Maps a shard to the indices of its items."""
        return grouped(self._shard_of(group_of(item)) for item in items)

    async def _routed(
        self,
        items: Sequence[Any],
        shard_of: Callable[[Any], int],
        ask: Callable[[int, Sequence[Any]], Awaitable[Sequence[_Answer]]],
    ) -> Sequence[_Answer]:
        """Each item's answer, in order."""
        parts = grouped(map(shard_of, items))
        replies = await asyncio.gather(*(ask(k, [items[i] for i in part]) for k, part in parts.items()))
        answers = {
            i: answer
            for part, reply in zip(parts.values(), replies, strict=True)
            for i, answer in zip(part, reply, strict=True)
        }
        return [answers[i] for i in range(len(items))]
