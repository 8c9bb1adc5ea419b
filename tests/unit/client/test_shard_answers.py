"""Counts of several shards as one: they grow, whichever shard starts again."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.shards import StatsMerger
from services.trainer.failure_budget import AllRewards


def shard(num_samples: int, reward: float, *, num_failed: int = 0) -> pb.StreamStats:
    """A shard whose samples all had this reward, but for those that failed."""
    failures = [pb.FailureCount(reason="HOOK_RAISED", num_samples=num_failed)] if num_failed else []
    scored = num_samples - num_failed
    return pb.StreamStats(
        stream="train",
        epoch=1,
        production=pb.Production(
            num_samples=num_samples,
            num_failed=num_failed,
            num_scored=scored,
            reward_sum=scored * reward,
            failures=failures,
        ),
    )


def test_a_shard_that_starts_again_takes_nothing_back() -> None:
    merger = StatsMerger()
    assert merger.merged([shard(40, 0.5), shard(30, 0.5, num_failed=6)]).production.num_samples == 70
    counts = merger.merged([shard(48, 0.5), shard(4, 0.5, num_failed=1)]).production  # the second one was killed
    assert (counts.num_samples, counts.num_failed, counts.num_scored) == (82, 7, 75)
    assert [(count.reason, count.num_samples) for count in counts.failures] == [("HOOK_RAISED", 7)]
    counts = merger.merged([shard(2, 0.5), shard(10, 0.5, num_failed=1)]).production  # and the first one
    assert (counts.num_samples, counts.num_scored) == (48 + 30 + 2 + 10, 48 + 24 + 2 + 9)


def test_what_a_filter_skipped_is_counted_over_all_shards_and_a_restart() -> None:
    def skipping(num_samples: int, equal_reward: float, *, reason: str = "all rewards are equal") -> pb.StreamStats:
        filtered = [pb.FilteredCount(reason=reason, equal_reward=equal_reward, num_samples=num_samples)]
        production = pb.Production(num_samples=num_samples, num_dropped=num_samples, filtered=filtered)
        production.lowest_reward = production.highest_reward = equal_reward
        return pb.StreamStats(stream="train", epoch=1, production=production)

    merger, rewards = StatsMerger(), AllRewards()
    first = rewards.since(merger.merged([skipping(32, 1.0), skipping(16, 0.0)]))
    assert (first["samples/filtered"], first["samples/produced"]) == (48.0, 48.0)
    assert (first["samples/filtered/all_right"], first["samples/filtered/all_wrong"]) == (32.0, 16.0)
    again = rewards.since(merger.merged([skipping(40, 1.0), skipping(4, 0.0, reason="too long")]))
    assert (again["samples/filtered"], again["samples/filtered/all_right"]) == (12.0, 8.0)
    assert again["samples/filtered/reason/too long"] == 4.0
