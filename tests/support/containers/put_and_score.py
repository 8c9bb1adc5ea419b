"""A client of buffer and reward service, as a program: leases a group, has its samples scored, and puts them."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from headrace.api.buffer.v1 import buffer_pb2
from headrace.client.open import open_buffer
from headrace.client.reward import RewardClient
from headrace.score import Score, ScoreItem
from headrace.trajectory import PolicyRange, Sample, Status


async def main(buffer_address: str, reward_address: str) -> None:
    """The policy knows one answer. Prints rewards, and the state that the group has afterwards."""
    async with open_buffer(buffer_address) as buffer, RewardClient(reward_address) as reward:
        (lease,) = (await buffer.lease_groups("train", "client", 1, wait_seconds=30.0)).leases
        prompt, responses = lease.prompt, [lease.prompt.label, *["no idea"] * (lease.n_samples - 1)]
        items = [ScoreItem(str(i), prompt.text, text, prompt.label) for i, text in enumerate(responses)]
        scores = await reward.score(items, deadline_seconds=60.0)
        rewards = [score.value for score in scores if isinstance(score, Score)]
        samples = [sample(lease, i, *pair).pack() for i, pair in enumerate(zip(responses, rewards, strict=True))]
        put = buffer_pb2.GroupPut(
            lease_id=lease.lease_id, group_id=lease.group_id, outcome=buffer_pb2.PUT_OUTCOME_COMPLETE, samples=samples
        )
        (result,) = await buffer.put_groups([put])
        print(rewards, buffer_pb2.GroupState.Name(result.state))


def sample(lease: buffer_pb2.GroupLease, index: int, response: str, reward: float) -> Sample:
    """Three tokens of prompt, two of response."""
    return Sample(
        sample_id=f"{lease.group_id}/{lease.attempt}/{index}",
        group_id=lease.group_id,
        index=index,
        prompt=lease.prompt.text,
        response=response,
        tokens=np.arange(3, 8, dtype=np.int32),
        loss_mask=np.ones(2, np.uint8),
        rollout_log_probs=np.full(2, -1.0, np.float32),
        status=Status.COMPLETED,
        reward=reward,
        policy_ranges=[PolicyRange(lease.policy_version, 0, 2)],
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
