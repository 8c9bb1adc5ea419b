"""Prompts and samples as a producer makes them."""

from __future__ import annotations

import numpy as np

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.trajectory import PolicyRange, Sample, Status


def text_prompts(*names: str) -> list[sample_pb2.Prompt]:
    """One text prompt for each name."""
    return [sample_pb2.Prompt(prompt_id=name, text=f"What is {name}?") for name in names]


def completed_sample(lease: pb.GroupLease, index: int, policy_version: int) -> Sample:
    """Five tokens, two of them the response."""
    return Sample(
        sample_id=f"{lease.lease_id}/{index}",
        group_id=lease.group_id,
        index=index,
        prompt=lease.prompt.text,
        response="ok",
        tokens=np.array([1, 2, 3, 10 + index, 5], np.int32),
        loss_mask=np.ones(2, np.uint8),
        rollout_log_probs=np.zeros(2, np.float32),
        status=Status.COMPLETED,
        reward=1.0,
        policy_ranges=[PolicyRange(policy_version, 0, 2)],
    )


def complete_put(lease: pb.GroupLease, policy_version: int | None = None) -> pb.GroupPut:
    """A whole group for a lease."""
    version = lease.policy_version if policy_version is None else policy_version
    samples = [completed_sample(lease, i, version).pack() for i in range(lease.n_samples)]
    return pb.GroupPut(
        lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=samples
    )


def failed_put(lease: pb.GroupLease, reason: str = "ENGINE_DOWN") -> pb.GroupPut:
    """A group that could not be made."""
    failure = sample_pb2.Failure(reason=reason, message="nobody answered")
    return pb.GroupPut(lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_FAILED, failure=failure)
