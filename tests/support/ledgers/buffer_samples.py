"""Prompts and samples as a producer makes them."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.conformance.buffer import complete_put, completed_sample

__all__ = ["complete_put", "completed_sample", "failed_put", "text_prompts"]


def text_prompts(*names: str) -> list[sample_pb2.Prompt]:
    """One text prompt for each name."""
    return [sample_pb2.Prompt(prompt_id=name, text=f"What is {name}?") for name in names]


def failed_put(lease: pb.GroupLease, reason: str = "ENGINE_DOWN") -> pb.GroupPut:
    """A group that could not be made."""
    failure = sample_pb2.Failure(reason=reason, message="nobody answered")
    return pb.GroupPut(lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_FAILED, failure=failure)
