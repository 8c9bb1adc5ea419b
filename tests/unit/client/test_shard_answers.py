"""Counts of several shards as one: they grow, whichever shard starts again."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.shard_answers import StatsMerger
from services.trainer.metrics.all_rewards import AllRewards


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


def test_the_mean_of_all_rewards_is_right_over_a_restart() -> None:
    merger, rewards = StatsMerger(), AllRewards()
    rewards.since(merger.merged([shard(200, 0.9), shard(100, 0.1)]))
    found = rewards.since(merger.merged([shard(280, 0.9), shard(20, 0.1)]))
    assert found["reward/all/count"] == 100
    assert abs(found["reward/all/mean"] - (80 * 0.9 + 20 * 0.1) / 100) < 1e-9


def test_streams_are_counted_apart() -> None:
    merger = StatsMerger()
    merger.merged([shard(40, 0.5), shard(30, 0.5)])
    other = [shard(1, 0.5), shard(2, 0.5)]
    for part in other:
        part.stream = "other"
    assert merger.merged(other).production.num_samples == 3
