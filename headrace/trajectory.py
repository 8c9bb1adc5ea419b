"""One sample: what the policy did, frozen, with invariants checked once, by `headrace.sample_checks`.

Lengths: T = len(tokens) = prompt + response, R = response_length = len(loss_mask) = len(rollout_log_probs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.digest import digest_of, matches
from headrace.errors import DataLoss, InvalidArgument
from headrace.policy_range import PolicyRange, check_ranges
from headrace.sample_checks import (
    LOSS_MASK,
    ROLLOUT_LOG_PROBS,
    ROUTED_EXPERTS,
    TEACHER_LOG_PROBS,
    TOKENS,
    check_experts,
    check_index,
    check_log_probs,
    check_loss_mask,
    check_reward,
    check_row,
    check_text,
    check_token_ids,
)
from headrace.wire.column import pack_column, unpack_column
from headrace.wire.json_text import from_json, to_json

__all__ = [
    "ROUTED_EXPERTS",
    "Failure",
    "PolicyRange",
    "Sample",
    "Status",
    "check_payload",
    "from_json",
    "pack_column",
    "parsed_payload",
    "to_json",
    "unpack_column",
]


class Status(StrEnum):
    """The state in which a generation ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @classmethod
    def of(cls, number: pb.SampleStatus.ValueType) -> Status:
        """The status behind its number on the wire. Raises InvalidArgument for UNSPECIFIED and unknown ones."""
        if number not in _BY_NUMBER:
            raise InvalidArgument(f"sample status {number} is not one of {', '.join(cls.__members__)}")
        return _BY_NUMBER[number]

    @property
    def number(self) -> pb.SampleStatus.ValueType:
        return pb.SampleStatus.Value(f"SAMPLE_STATUS_{self.name}")


_BY_NUMBER = {status.number: status for status in Status}

FILTERED = "FILTERED"
"""The reason of a group that the job's filter dropped; what the filter said is the message."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause of a failure: `reason` for programs (UPPER_SNAKE_CASE), `message` for people."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response of the policy to one prompt. Raises InvalidArgument when its parts contradict each other."""

    sample_id: str
    group_id: str
    index: int
    prompt: str
    response: str
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    rollout_log_probs: NDArray[np.float32]
    status: Status
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    scorer: str = ""
    scorer_version: str = ""
    failure: Failure | None = None
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    train_metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    policy_ranges: Sequence[PolicyRange] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    rollout_id: str = ""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further arrays by name, e.g. teacher_log_probs float32 [R]."""
    hook_fields: Mapping[str, Any] = field(default_factory=dict)
    """JSON: what users' functions set and see again, and nobody else reads; `headrace.hooks.convert` has the names."""

    def __post_init__(self) -> None:
        """Checks the parts. The first token of a sample without a prompt is masked: nothing predicts it."""
        check_text("sample_id", self.sample_id)
        name = f"sample {self.sample_id}:"
        for field_name in ("group_id", "prompt", "response", "rollout_id"):
            check_text(f"{name} {field_name}", getattr(self, field_name))
        if self.label is not None:
            check_text(f"{name} label", self.label)
        check_index(f"{name} index", self.index)
        self._check_arrays(name)
        check_ranges(f"{name} policy_ranges", self.policy_ranges, self.response_length)
        if (self.status is Status.FAILED) != (self.failure is not None):
            raise InvalidArgument(
                f"{name} status {self.status.value} with failure {self.failure}: failed samples have one, others none"
            )
        if self.reward is not None:
            check_reward(f"{name} reward", self.reward)
        for part, value in self.reward_parts.items():
            check_reward(f"{name} reward_parts[{part!r}]", value)
        if not self.prompt_length and self.loss_mask[:1].any():
            object.__setattr__(self, LOSS_MASK, np.concatenate((np.zeros(1, np.uint8), self.loss_mask[1:])))

    def _check_arrays(self, name: str) -> None:
        check_row(f"{name} {TOKENS}", self.tokens)
        check_token_ids(f"{name} {TOKENS}", self.tokens)
        check_row(f"{name} {LOSS_MASK}", self.loss_mask)
        check_loss_mask(f"{name} {LOSS_MASK}", self.loss_mask)
        total, response = len(self.tokens), len(self.loss_mask)
        if response > total:
            raise InvalidArgument(f"{name} {LOSS_MASK} has {response} entries, more than the {total} tokens")
        if not total and self.status is not Status.FAILED:
            raise InvalidArgument(f"{name} {TOKENS} is empty: a sample needs a prompt or a response")
        for column, values in ((ROLLOUT_LOG_PROBS, self.rollout_log_probs), *self.columns.items()):
            if column in (ROLLOUT_LOG_PROBS, TEACHER_LOG_PROBS):
                check_row(f"{name} {column}", values, response)
                check_log_probs(f"{name} {column}", values)
            elif column == ROUTED_EXPERTS:
                check_experts(f"{name} {column}", values, total)

    @property
    def response_length(self) -> int:
        """R: response tokens, those of tools included."""
        return len(self.loss_mask)

    @property
    def prompt_length(self) -> int:
        """The number of prompt tokens, T - R."""
        return len(self.tokens) - len(self.loss_mask)

    def pack(self) -> pb.Sample:
        """Serializes the sample into envelope and payload."""
        payload = pb.SamplePayload(
            prompt=self.prompt,
            response=self.response,
            label=self.label,
            metadata_json=to_json(self.metadata),
            sampling_params_json=to_json(self.sampling_params),
            train_metadata_json=to_json(self.train_metadata),
            hook_json=to_json(self.hook_fields),
            columns=[
                pack_column("tokens", self.tokens.astype(np.int32, copy=False)),
                pack_column("loss_mask", self.loss_mask.astype(np.uint8, copy=False)),
                pack_column("rollout_log_probs", self.rollout_log_probs.astype(np.float32, copy=False)),
                *(pack_column(name, array) for name, array in self.columns.items()),
            ],
        ).SerializeToString(deterministic=True)
        envelope = pb.SampleEnvelope(
            sample_id=self.sample_id,
            group_id=self.group_id,
            index=self.index,
            rollout_id=self.rollout_id or self.sample_id,
            status=self.status.number,
            reward=self.reward,
            reward_parts=self.reward_parts,
            scorer=self.scorer,
            scorer_version=self.scorer_version,
            failure=pb.Failure(reason=self.failure.reason, message=self.failure.message) if self.failure else None,
            prompt_tokens=self.prompt_length,
            response_tokens=self.response_length,
            trained_tokens=int(self.loss_mask.sum()),
            policy_ranges=[
                pb.PolicyRange(policy_version=r.policy_version, start=r.start, end=r.end, masked=r.masked)
                for r in self.policy_ranges
            ],
            digest=digest_of(payload),
            payload_bytes=len(payload),
            tags=self.tags,
        )
        return pb.Sample(envelope=envelope, payload=payload)

    @classmethod
    def unpack(cls, packed: pb.Sample) -> Sample:
        """Reads a sample from the wire. Raises DataLoss on a digest mismatch, InvalidArgument on contradictions."""
        envelope = packed.envelope
        check_payload(envelope.sample_id, envelope.digest, envelope.payload_bytes, packed.payload)
        payload = parsed_payload(envelope.sample_id, packed.payload)
        arrays = _arrays(envelope.sample_id, payload)
        check_lengths(envelope, len(arrays[TOKENS]), len(arrays[LOSS_MASK]), int(arrays[LOSS_MASK].sum()))
        return cls(
            sample_id=envelope.sample_id,
            group_id=envelope.group_id,
            index=envelope.index,
            rollout_id=envelope.rollout_id,
            prompt=payload.prompt,
            response=payload.response,
            tokens=arrays.pop("tokens"),
            loss_mask=arrays.pop("loss_mask"),
            rollout_log_probs=arrays.pop("rollout_log_probs"),
            columns=arrays,
            status=Status.of(envelope.status),
            reward=envelope.reward if envelope.HasField("reward") else None,
            reward_parts=dict(envelope.reward_parts),
            scorer=envelope.scorer,
            scorer_version=envelope.scorer_version,
            failure=Failure(envelope.failure.reason, envelope.failure.message)
            if envelope.HasField("failure")
            else None,
            label=payload.label if payload.HasField("label") else None,
            metadata=from_json(payload.metadata_json),
            train_metadata=from_json(payload.train_metadata_json),
            hook_fields=from_json(payload.hook_json),
            sampling_params=from_json(payload.sampling_params_json),
            policy_ranges=tuple(
                PolicyRange(r.policy_version, r.start, r.end, r.masked) for r in envelope.policy_ranges
            ),
            tags=dict(envelope.tags),
        )


def check_payload(sample_id: str, digest: bytes, num_bytes: int, payload: bytes | memoryview) -> None:
    """Raises DataLoss unless the payload has this digest and length."""
    if len(payload) != num_bytes or not matches(digest, payload):
        raise DataLoss(
            f"sample {sample_id}: payload of {len(payload)} bytes does not match its digest "
            f"{digest.hex()[:16]}… over {num_bytes} bytes: pack it again"
        )


def check_lengths(envelope: pb.SampleEnvelope, total: int, response: int, trained: int) -> None:
    """Raises InvalidArgument when the payload has other numbers of tokens than the envelope says."""
    said = (envelope.prompt_tokens, envelope.response_tokens, envelope.trained_tokens)
    if said != (total - response, response, trained):
        raise InvalidArgument(
            f"sample {envelope.sample_id} says {said[0]} prompt, {said[1]} response and {said[2]} trained tokens, "
            f"its payload has {total - response}, {response} and {trained}"
        )


def parsed_payload(sample_id: str, payload: bytes) -> pb.SamplePayload:
    """Raises InvalidArgument when the bytes do not parse."""
    try:
        return pb.SamplePayload.FromString(payload)
    except DecodeError as error:
        raise InvalidArgument(f"sample {sample_id}: payload does not parse: {error}") from error


def _arrays(sample_id: str, payload: pb.SamplePayload) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for column in payload.columns:
        if column.name in arrays:
            raise InvalidArgument(f"sample {sample_id}: column {column.name} comes twice")
        arrays[column.name] = unpack_column(column)
    for name in (TOKENS, LOSS_MASK, ROLLOUT_LOG_PROBS):
        if name not in arrays:
            raise InvalidArgument(f"sample {sample_id}: payload lacks the column {name}")
        check_row(f"sample {sample_id}: {name}", arrays[name])
    return arrays
