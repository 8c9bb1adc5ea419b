"""A step's batch before its payload is fetched: the light facts that every rank needs to divide the work alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.trajectory import Status


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What is known of a sample without its payload. Lengths are in tokens."""

    sample_id: str
    group_id: str
    rollout_id: str
    """One execution that fanned out into several samples gives all of them the same; else the sample's own id."""
    reward: float | None
    status: str
    prompt_length: int
    response_length: int
    trained_tokens: int
    min_policy_version: int | None

    @classmethod
    def of(cls, envelope: sample_pb2.SampleEnvelope) -> SampleFacts:
        """From the ledger's envelope."""
        versions = [r.policy_version for r in envelope.policy_ranges if not r.masked]
        return cls(
            sample_id=envelope.sample_id,
            group_id=envelope.group_id,
            rollout_id=envelope.rollout_id or envelope.sample_id,
            reward=envelope.reward if envelope.HasField("reward") else None,
            status=Status.of(envelope.status).value,
            prompt_length=envelope.prompt_tokens,
            response_length=envelope.response_tokens,
            trained_tokens=envelope.trained_tokens,
            min_policy_version=min(versions, default=None),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step in training order, and the digest that names the batch to the ledger."""

    samples: Sequence[SampleFacts]
    digest: bytes

    @classmethod
    def of(cls, reply: buffer_pb2.LeaseBatchResponse) -> Batch:
        """From a ready answer of LeaseBatch."""
        facts = tuple(SampleFacts.of(envelope) for group in reply.groups for envelope in group.samples)
        return cls(facts, reply.digest)


def statistics(batch: Batch, step: int) -> dict[str, float]:
    """What the batch says before it is trained: rewards, lengths, staleness in steps."""
    judged = [s.reward for s in batch.samples if s.reward is not None]
    lengths = [s.response_length for s in batch.samples]
    staleness = [step - s.min_policy_version for s in batch.samples if s.min_policy_version is not None]
    found = {
        "samples/count": float(len(batch.samples)),
        "samples/failed": float(len(batch.samples) - len(judged)),
        "response_length/mean": float(np.mean(lengths)),
        "response_length/max": float(max(lengths)),
        "truncated_ratio": sum(s.status == Status.TRUNCATED.value for s in batch.samples) / len(batch.samples),
    }
    if judged:
        found |= {"reward/mean": float(np.mean(judged)), "reward/std": float(np.std(judged))}
    if staleness:
        found |= {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}
        found |= {f"staleness/lag_{lag}": staleness.count(lag) / len(staleness) for lag in sorted(set(staleness))}
    return found
