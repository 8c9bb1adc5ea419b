"""One ledger in several buffers: shard k of N has every group whose number is k modulo N.

Every shard has its own producers' share, batches, journal and disk. A step's batch is the shards' batches one after the
other, so it is as deterministic as they are, and shards need not agree on anything. The groups of a shard that is down
wait until it is back: leases come from the other shards, and a batch waits for all of them.
Positions of the history belong to a shard: `watch` can be read from the beginning only; `shards` are for resuming.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing
from itertools import count
from typing import Any, TypeVar

from google.protobuf.message import Message

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BatchClient, BufferClient, SharedWaits
from headrace.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.limits import MAX_COUNTER, share_of_count, share_of_least, share_of_limit, whole_number
from headrace.rpc.client import DEFAULT_DEADLINE_SECONDS, merged_streams

_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")


def shard_of_group(group_id: str, num_shards: int) -> int:
    """The group's number modulo `num_shards`. Raises NotFound when the id has no number."""
    number = whole_number(group_id.rpartition("/")[2], MAX_COUNTER)
    if number is None:
        raise NotFound(f"there is no group {group_id}: a group's id ends with /NUMBER")
    return number % num_shards


def grouped(shards: Iterable[int]) -> dict[int, list[int]]:
    """Maps a shard to the indices of its items."""
    parts: dict[int, list[int]] = {}
    for i, k in enumerate(shards):
        parts.setdefault(k, []).append(i)
    return parts


def group_of_lease(lease_id: str) -> str:
    """A lease's id begins with its group's."""
    return lease_id.partition("#")[0]


def shard_of_prompt(prompt: sample_pb2.Prompt, num_shards: int) -> int:
    """A hash of its id chooses the shard, so a prompt that is submitted again gets the same one."""
    digest = hashlib.sha256(prompt.prompt_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % num_shards


def answers_that_came(found: Sequence[_Answer | BaseException], *, least: int) -> list[_Answer]:
    """The answers without the errors.

    Raises an error when there are fewer than `least` answers, or when one of the errors is not a sign of a missing
    shard.
    """
    answers: list[_Answer] = []
    errors: list[BaseException] = []
    for each in found:
        if isinstance(each, BaseException):
            errors.append(each)
        else:
            answers.append(each)
    telling = [error for error in errors if not isinstance(error, Unavailable | DeadlineExceeded)]
    if telling or (errors and len(answers) < least):
        raise (telling or errors)[0]
    return answers


def soonest_reason(reasons: Sequence[pb.NoLeaseReason.ValueType]) -> pb.NoLeaseReason.ValueType:
    """The reason of the shard that may lease soonest.

    EXHAUSTED only when all shards say so, UNSPECIFIED when none gives a reason.
    """
    told = sorted(set(reasons) - {pb.NO_LEASE_REASON_UNSPECIFIED}, key=lambda r: r == pb.NO_LEASE_REASON_EXHAUSTED)
    return told[0] if told else pb.NO_LEASE_REASON_UNSPECIFIED


_COUNTS = ("groups_per_step", "over_sampling_groups")
_LIMITS = ("max_payload_bytes", "max_queued_groups", "max_groups", "max_leases")
"""0 is the buffer's default, for each shard."""


def share_of(config: pb.StreamConfig, shard: int, num_shards: int) -> pb.StreamConfig:
    """The shard's part of a stream: every count and limit is divided, as the job's own stream divides them.

    Raises InvalidArgument when a step has fewer groups than there are shards.
    """
    if config.groups_per_step < num_shards:
        raise InvalidArgument(
            f"groups_per_step {config.groups_per_step} of {config.name} is less than the {num_shards} shards: "
            "every shard needs a group in every step",
            field="config.groups_per_step",
        )
    share = pb.StreamConfig()
    share.CopyFrom(config)
    share.shard, share.num_shards = shard, num_shards
    for name in _COUNTS:
        setattr(share, name, share_of_count(getattr(config, name), shard, num_shards))
    for name in _LIMITS:
        setattr(share, name, share_of_limit(getattr(config, name), num_shards))
    if least := config.limiter.min_size_to_sample:
        share.limiter.min_size_to_sample = share_of_least(least, shard, num_shards)
    return share


def merged_config(shares: Sequence[pb.StreamConfig]) -> pb.StreamConfig:
    """The inverse of `share_of`, but that limits are rounded up to what the shards hold together."""
    whole = pb.StreamConfig()
    whole.CopyFrom(shares[0])
    whole.ClearField("shard")
    whole.ClearField("num_shards")
    for name in (*_COUNTS, *_LIMITS):
        setattr(whole, name, sum(getattr(share, name) for share in shares))
    if whole.HasField("limiter"):
        whole.limiter.min_size_to_sample = sum(share.limiter.min_size_to_sample for share in shares)
    return whole


def merged_leases(parts: Sequence[pb.LeaseGroupsResponse], num_shards: int) -> pb.LeaseGroupsResponse:
    """The leases of the shards that answered; `oldest_version` is 0 when one did not answer."""
    leases = [lease for part in parts for lease in part.leases]
    return pb.LeaseGroupsResponse(
        leases=leases,
        no_lease_reason=soonest_reason([part.no_lease_reason for part in parts if not leases]),
        oldest_version=min(part.oldest_version for part in parts) if len(parts) == num_shards else 0,
    )


def batch_digest(parts: Sequence[pb.LeaseBatchResponse]) -> bytes:
    """SHA-256 over the parts' digests in the order of the shards."""
    return hashlib.sha256(b"".join(part.digest for part in parts)).digest()


def merged_batch(parts: Sequence[pb.LeaseBatchResponse]) -> pb.LeaseBatchResponse:
    """The groups in the order of the shards; ready only when all parts are."""
    groups_ready = sum(part.groups_ready for part in parts)
    if not all(part.ready for part in parts):
        return pb.LeaseBatchResponse(ready=False, groups_ready=groups_ready)
    groups = [group for part in parts for group in part.groups]
    return pb.LeaseBatchResponse(ready=True, groups=groups, digest=batch_digest(parts), groups_ready=groups_ready)


class StatsMerger:
    """Joins the counts of a stream's shards.

    What producers put is counted since a buffer's start. A shard that starts again would take its counts back, which
    no reader could tell from what the others add: its earlier ones stay in the sum, as far as they were read here.
    """

    def __init__(self) -> None:
        self._read: dict[str, list[pb.Production]] = {}
        self._before_restarts: defaultdict[str, pb.Production] = defaultdict(pb.Production)

    def merged(self, parts: Sequence[pb.StreamStats]) -> pb.StreamStats:
        """Adds the counts; the trainer's position is the lowest of all shards."""
        stream, now = parts[0].stream, [part.production for part in parts]
        for before, after in zip(self._read.get(stream, now), now, strict=True):
            if after.num_samples < before.num_samples:
                self._before_restarts[stream] = _merged_production([before, self._before_restarts[stream]])
        self._read[stream] = now
        return _merged_stats(parts, [*now, self._before_restarts[stream]])


def _merged_stats(parts: Sequence[pb.StreamStats], productions: Sequence[pb.Production]) -> pb.StreamStats:
    merged = pb.StreamStats(
        stream=parts[0].stream,
        **_joined(sum, parts, "payload_bytes", "prompts_read"),
        **_joined(min, parts, "epoch", "step", "committed_step", "policy_version", "data_epoch"),
        **_joined(max, parts, "bad_lines"),
        production=_merged_production(productions),
    )
    for part in parts:
        for state, number in part.groups.items():
            merged.groups[state] += number
    merged.sources.extend(map(_merged_source, zip(*(part.sources for part in parts), strict=True)))
    if all(part.HasField("admissible_groups") for part in parts):
        merged.admissible_groups = sum(part.admissible_groups for part in parts)
    return merged


def _joined(join: Callable[[Iterable[Any]], Any], parts: Sequence[Message], *names: str) -> dict[str, Any]:
    """These fields of all parts, joined by `sum`, `min` or `max`."""
    return {name: join(getattr(part, name) for part in parts) for name in names}


def _merged_production(parts: Sequence[pb.Production]) -> pb.Production:
    """Adds the counts. A reason's example comes from the shard with the most samples of that reason."""
    failures: dict[str, pb.FailureCount] = {}
    for one in sorted((f for part in parts for f in part.failures), key=lambda f: -f.num_samples):
        failures.setdefault(one.reason, pb.FailureCount(reason=one.reason, example=one.example, group_id=one.group_id))
        failures[one.reason].num_samples += one.num_samples
    filtered: Counter[tuple[str, float | None]] = Counter()
    for skipped in (skipped for part in parts for skipped in part.filtered):
        filtered[skipped.reason, skipped.equal_reward if skipped.HasField("equal_reward") else None] += (
            skipped.num_samples
        )
    return pb.Production(
        **_joined(sum, parts, "num_samples", "num_failed", "num_dropped", "num_scored", "reward_sum"),
        **_joined(sum, parts, "num_groups_returned"),
        failures=sorted(failures.values(), key=lambda f: -f.num_samples),
        last_return=next((part.last_return for part in parts if part.last_return), ""),
        filtered=[
            pb.FilteredCount(reason=reason, equal_reward=reward, num_samples=number)
            for (reason, reward), number in filtered.most_common()
        ],
        lowest_reward=min((p.lowest_reward for p in parts if p.HasField("lowest_reward")), default=None),
        highest_reward=max((p.highest_reward for p in parts if p.HasField("highest_reward")), default=None),
    )


def _merged_source(parts: Sequence[pb.SourceStats]) -> pb.SourceStats:
    """Every shard reads the whole file, so the progress is that of the shard that has read furthest."""
    return pb.SourceStats(
        name=parts[0].name,
        weight=parts[0].weight,
        **_joined(max, parts, "prompts_read"),
        **_joined(min, parts, "data_epoch", "ended"),
        **_joined(sum, parts, "queued", "leased", "ready", "batched"),
    )


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
        with ExitStack() as on_failure:
            on_failure.callback(unanswered.append, request)
            reply = await self.clients[k].lease_groups(stream, producer_id, share, request_id=request)
            on_failure.pop_all()
        return reply


_MAX_REWINDS = 8
_EVENTS_AHEAD = 1_000


class ShardedBuffer(BatchClient):
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
            *(self._leases.clients[k].renew_leases(part) for k, part in parts.items()),
            return_exceptions=True,
        )
        merged = pb.RenewLeasesResponse()
        for reply in answers_that_came(found, least=1):
            merged.renewed.extend(reply.renewed)
            merged.lost.extend(reply.lost)
        return merged

    async def release_leases(self, releases: Sequence[pb.LeaseRelease]) -> None:
        parts = self._parts(releases, lambda release: group_of_lease(release.lease_id))
        await asyncio.gather(*(self.shards[k].release_leases(part) for k, part in parts.items()))

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
        asked = parts if group_ids else {k: [] for k in range(len(self.shards))}
        replies = await asyncio.gather(
            *(self.shards[k].retry_groups(stream, part, request_id=request) for k, part in asked.items())
        )
        return pb.RetryGroupsResponse(**_joined(sum, replies, "num_groups", "num_failed"))

    async def drop_groups(
        self, stream: str, group_ids: Sequence[str], reason: str, *, request_id: str | None = None
    ) -> pb.DropGroupsResponse:
        """Each shard's part is dropped whole or not at all."""
        request, parts = request_id or uuid.uuid4().hex, self._parts(group_ids, lambda group_id: group_id)
        replies = await asyncio.gather(
            *(self.shards[k].drop_groups(stream, part, reason, request_id=request) for k, part in parts.items())
        )
        return pb.DropGroupsResponse(**_joined(sum, replies, "num_groups", "num_batches"))

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
    ) -> AsyncGenerator[pb.LedgerEvent]:
        """Merges all shards' histories in the order of arrival. `position` is the shard's own."""
        if from_position > 1:
            raise InvalidArgument(
                f"position {from_position} belongs to one shard: watch that one of `shards` from there, or all from 0"
            )
        parts = [shard.watch(stream, from_position, deadline_seconds=deadline_seconds) for shard in self.shards]
        async with aclosing(merged_streams(parts, _EVENTS_AHEAD)) as events:
            async for event in events:
                yield event

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
            replies = [await self.shards[k].list_groups(stream, states, group_ids=part) for k, part in parts.items()]
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

    def _parts(self, items: Sequence[_Item], group_of: Callable[[_Item], str]) -> dict[int, list[_Item]]:
        """Each shard's items."""
        shards = [self._shard_of(group_of(item)) for item in items]
        return {k: [items[i] for i in part] for k, part in grouped(shards).items()}

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
