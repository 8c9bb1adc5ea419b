"""A step's batch before its payload is fetched: the light facts that every rank needs to divide the work alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.trajectory import ROLE, PolicyRange, Status, check_ranges, check_reward


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """A sample without its payload. Lengths are in tokens."""

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
    role: str = ""
    """Which of several agents of a task; its rewards count against those of the same role."""
    scored_by: str = ""
    """The scorer that paid for it, and the scorer's version."""
    index: int = 0
    """Position in the group."""
    set_aside: str | None = None
    """Why the trainer cannot use it, where it cannot: it counts as FAILED."""

    @property
    def rollout(self) -> tuple[str, str]:
        """Names its rollout: groups number theirs as they like."""
        return self.group_id, self.rollout_id

    @classmethod
    def of(cls, envelope: sample_pb2.SampleEnvelope) -> SampleFacts:
        """The facts in the ledger's envelope. A sample whose envelope is not valid is set aside, each time it comes."""
        try:
            _check(envelope)
        except InvalidArgument as error:
            return cls._unreadable(envelope, error.message)
        versions = [r.policy_version for r in envelope.policy_ranges if not r.masked]
        return cls(
            sample_id=envelope.sample_id,
            group_id=envelope.group_id,
            rollout_id=envelope.rollout_id or envelope.sample_id,
            reward=envelope.reward if envelope.HasField("reward") else None,
            status=Status.of(envelope.status).value,
            prompt_length=envelope.prompt_tokens,
            response_length=envelope.response_tokens,
            # Without a prompt, nothing predicts the first token (see Sample).
            trained_tokens=min(envelope.trained_tokens, max(envelope.prompt_tokens + envelope.response_tokens - 1, 0)),
            min_policy_version=min(versions, default=None),
            role=envelope.tags.get(ROLE, ""),
            index=envelope.index,
            scored_by=f"{envelope.scorer} {envelope.scorer_version}".strip(),
        )

    @classmethod
    def _unreadable(cls, envelope: sample_pb2.SampleEnvelope, why: str) -> SampleFacts:
        ids = (envelope.sample_id, envelope.group_id, envelope.rollout_id or envelope.sample_id)
        return cls(*ids, None, Status.FAILED.value, 0, 0, 0, None, set_aside=why)

    def without(self, why: str) -> SampleFacts:
        """The sample set aside: FAILED, so it is not trained, and outside of its group's statistics."""
        return replace(self, reward=None, status=Status.FAILED.value, set_aside=why)


def _check(envelope: sample_pb2.SampleEnvelope) -> None:
    """Raises InvalidArgument for an envelope that the step cannot be planned with."""
    failed = Status.of(envelope.status) is Status.FAILED
    if envelope.HasField("reward"):
        check_reward("reward", envelope.reward)
    response = envelope.response_tokens
    if envelope.trained_tokens > response or not (failed or envelope.prompt_tokens or response):
        raise InvalidArgument(
            f"the envelope counts {envelope.prompt_tokens} prompt, {response} response and {envelope.trained_tokens} "
            "trained tokens, which no sample can have"
        )
    ranges = [PolicyRange(r.policy_version, r.start, r.end, r.masked) for r in envelope.policy_ranges]
    check_ranges("policy_ranges", ranges, response)


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step in training order, and the digest that names the batch to the ledger."""

    samples: Sequence[SampleFacts]
    digest: bytes

    @classmethod
    def of(cls, reply: buffer_pb2.LeaseBatchResponse) -> Batch:
        facts = tuple(SampleFacts.of(envelope) for group in reply.groups for envelope in group.samples)
        return cls(facts, reply.digest)


def statistics(batch: Batch, step: int) -> dict[str, float]:
    """A batch's figures before it is trained: rewards, lengths, staleness in steps."""
    scored = [s.reward for s in batch.samples if s.reward is not None]
    lengths = [s.response_length for s in batch.samples]
    staleness = [step - s.min_policy_version for s in batch.samples if s.min_policy_version is not None]
    found = {
        "samples/count": float(len(batch.samples)),
        "samples/failed": float(len(batch.samples) - len(scored)),
        "samples/set_aside": float(sum(s.set_aside is not None for s in batch.samples)),
        "response_length/mean": float(np.mean(lengths)),
        "response_length/max": float(max(lengths)),
        "truncated_ratio": sum(s.status == Status.TRUNCATED.value for s in batch.samples) / len(batch.samples),
    }
    if scored:
        found |= {"reward/mean": float(np.mean(scored)), "reward/std": float(np.std(scored))}
    for role in sorted({s.role for s in batch.samples} - {""}):
        of_role = [s.reward for s in batch.samples if s.role == role and s.reward is not None]
        found |= {f"reward/role/{role}/mean": float(np.mean(of_role))} if of_role else {}
    if staleness:
        found |= {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}
        found |= {f"staleness/lag_{lag}": staleness.count(lag) / len(staleness) for lag in sorted(set(staleness))}
    return found
