"""Joins the responses of several shards into the response that one buffer would give."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.shard_routing import soonest_reason
from headrace.errors import InvalidArgument
from headrace.wire.shares import share_of_count, share_of_least, share_of_limit

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
    """The leases of the shards that answered; `oldest_version` is what holds for the leases of all shards."""
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
        payload_bytes=sum(part.payload_bytes for part in parts),
        epoch=min(part.epoch for part in parts),
        step=min(part.step for part in parts),
        committed_step=min(part.committed_step for part in parts),
        policy_version=min(part.policy_version for part in parts),
        prompts_read=sum(part.prompts_read for part in parts),
        data_epoch=min(part.data_epoch for part in parts),
        bad_lines=max(part.bad_lines for part in parts),
        production=_merged_production(productions),
    )
    for part in parts:
        for state, number in part.groups.items():
            merged.groups[state] += number
    merged.sources.extend(map(_merged_source, zip(*(part.sources for part in parts), strict=True)))
    if all(part.HasField("admissible_groups") for part in parts):
        merged.admissible_groups = sum(part.admissible_groups for part in parts)
    return merged


def _merged_production(parts: Sequence[pb.Production]) -> pb.Production:
    """Adds the counts; the example of a reason comes from the shard that has most of it."""
    failures: dict[str, pb.FailureCount] = {}
    for one in sorted((f for part in parts for f in part.failures), key=lambda f: -f.num_samples):
        failures.setdefault(one.reason, pb.FailureCount(reason=one.reason, example=one.example, group_id=one.group_id))
        failures[one.reason].num_samples += one.num_samples
    filtered: Counter[tuple[str, float | None]] = Counter()
    for count in (count for part in parts for count in part.filtered):
        filtered[count.reason, count.equal_reward if count.HasField("equal_reward") else None] += count.num_samples
    return pb.Production(
        num_samples=sum(part.num_samples for part in parts),
        num_failed=sum(part.num_failed for part in parts),
        num_dropped=sum(part.num_dropped for part in parts),
        num_scored=sum(part.num_scored for part in parts),
        reward_sum=sum(part.reward_sum for part in parts),
        failures=sorted(failures.values(), key=lambda f: -f.num_samples),
        num_groups_returned=sum(part.num_groups_returned for part in parts),
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
        prompts_read=max(part.prompts_read for part in parts),
        data_epoch=min(part.data_epoch for part in parts),
        ended=all(part.ended for part in parts),
        queued=sum(part.queued for part in parts),
        leased=sum(part.leased for part in parts),
        ready=sum(part.ready for part in parts),
        batched=sum(part.batched for part in parts),
    )
