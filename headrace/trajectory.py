"""Sample and Group: what the policy did, frozen, with invariants checked once at the edge.

Lengths: T = len(tokens) = prompt + response, R = response_length = len(loss_mask) = len(rollout_log_probs).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.digest import digest_of, matches
from headrace.errors import DataLoss, InvalidArgument

ROUTED_EXPERTS = "rollout_routed_experts"
"""Column int16 [T - 1, layers, experts of a token]: where engines sent each token but the last; -1 where unknown."""

_DTYPES: Mapping[pb.Dtype.ValueType, np.dtype[Any]] = {
    pb.DTYPE_UINT8: np.dtype("<u1"),
    pb.DTYPE_INT16: np.dtype("<i2"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_FLOAT64: np.dtype("<f8"),
}
_DTYPE_NUMBERS: Mapping[np.dtype[Any], pb.Dtype.ValueType] = {dtype: number for number, dtype in _DTYPES.items()}


class Status(StrEnum):
    """How a generation ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @classmethod
    def of(cls, number: pb.SampleStatus.ValueType) -> Status:
        """The status behind its number on the wire. Raises InvalidArgument for UNSPECIFIED."""
        name = pb.SampleStatus.Name(number).removeprefix("SAMPLE_STATUS_")
        if name not in cls.__members__:
            raise InvalidArgument(f"sample status {name} is not one of {', '.join(cls.__members__)}")
        return cls[name]

    @property
    def number(self) -> pb.SampleStatus.ValueType:
        return pb.SampleStatus.Value(f"SAMPLE_STATUS_{self.name}")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed: `reason` for programs (UPPER_SNAKE_CASE), `message` for people."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PolicyRange:
    """Response tokens [start, end) were sampled under `policy_version`."""

    policy_version: int
    start: int
    end: int
    masked: bool = False
    """None of them is trained: their age does not count."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One answer of the policy to one prompt. Raises InvalidArgument when its parts contradict each other."""

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

    def __post_init__(self) -> None:
        total, response = len(self.tokens), len(self.loss_mask)
        if response > total:
            raise InvalidArgument(f"sample {self.sample_id}: loss_mask has {response} entries for {total} tokens")
        if len(self.rollout_log_probs) != response:
            raise InvalidArgument(
                f"sample {self.sample_id}: {len(self.rollout_log_probs)} rollout_log_probs, {response} in loss_mask"
            )
        if not np.isfinite(self.rollout_log_probs).all():
            where = int(np.flatnonzero(~np.isfinite(self.rollout_log_probs))[0])
            raise InvalidArgument(
                f"sample {self.sample_id}: rollout_log_probs[{where}] is {self.rollout_log_probs[where]}, not finite"
            )
        if response and self.loss_mask.max() > 1:
            raise InvalidArgument(f"sample {self.sample_id}: loss_mask holds {self.loss_mask.max()}, must be 0 or 1")
        if (self.status is Status.FAILED) != (self.failure is not None):
            raise InvalidArgument(f"sample {self.sample_id}: status {self.status.value} with failure {self.failure}")
        if self.reward is not None and not np.isfinite(self.reward):
            raise InvalidArgument(f"sample {self.sample_id}: reward is {self.reward}, must be finite")

    @property
    def response_length(self) -> int:
        """R: response tokens, those of tools included."""
        return len(self.loss_mask)

    @property
    def prompt_length(self) -> int:
        """T - R."""
        return len(self.tokens) - len(self.loss_mask)

    def pack(self) -> pb.Sample:
        """The sample as it travels: envelope and payload."""
        payload = pb.SamplePayload(
            prompt=self.prompt,
            response=self.response,
            label=self.label,
            metadata_json=to_json(self.metadata),
            sampling_params_json=to_json(self.sampling_params),
            train_metadata_json=to_json(self.train_metadata),
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
        try:
            payload = pb.SamplePayload.FromString(packed.payload)
        except DecodeError as error:
            raise InvalidArgument(f"sample {envelope.sample_id}: payload does not parse: {error}") from error
        arrays = {column.name: unpack_column(column) for column in payload.columns}
        missing = {"tokens", "loss_mask", "rollout_log_probs"} - arrays.keys()
        if missing:
            raise InvalidArgument(f"sample {envelope.sample_id}: payload lacks the columns {sorted(missing)}")
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
            sampling_params=from_json(payload.sampling_params_json),
            policy_ranges=tuple(
                PolicyRange(r.policy_version, r.start, r.end, r.masked) for r in envelope.policy_ranges
            ),
            tags=dict(envelope.tags),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and its samples, identified by id, never by position or shape."""

    group_id: str
    samples: Sequence[Sample]

    def __post_init__(self) -> None:
        strangers = {s.group_id for s in self.samples} - {self.group_id}
        if strangers:
            raise InvalidArgument(f"group {self.group_id} holds samples of {sorted(strangers)}")

    @property
    def judged(self) -> Iterable[Sample]:
        """Samples that take part in the group's statistics: produced and judged."""
        return (s for s in self.samples if s.status is not Status.FAILED and s.reward is not None)


def check_payload(sample_id: str, digest: bytes, num_bytes: int, payload: bytes | memoryview) -> None:
    """Raises DataLoss unless digest and length, which its envelope names, are those of the payload."""
    if len(payload) != num_bytes or not matches(digest, payload):
        raise DataLoss(
            f"sample {sample_id}: payload of {len(payload)} bytes does not match its digest "
            f"{digest.hex()[:16]}… over {num_bytes} bytes: pack it again"
        )


def pack_column(name: str, array: NDArray[Any]) -> pb.Column:
    """An array as raw little-endian bytes. Raises InvalidArgument for a dtype off the whitelist."""
    number = _DTYPE_NUMBERS.get(array.dtype.newbyteorder("<"))
    if number is None:
        allowed = ", ".join(str(d) for d in _DTYPE_NUMBERS)
        raise InvalidArgument(f"column {name}: dtype {array.dtype} cannot travel; use one of {allowed}")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return pb.Column(name=name, dtype=number, shape=array.shape, data=little.tobytes())


def unpack_column(column: pb.Column) -> NDArray[Any]:
    """The array of a column (read-only, no copy). Raises InvalidArgument when shape, dtype and bytes disagree."""
    dtype = _DTYPES.get(column.dtype)
    if dtype is None:
        raise InvalidArgument(f"column {column.name}: dtype {column.dtype} is not known here")
    expected = int(np.prod(column.shape, dtype=np.int64)) * dtype.itemsize
    if any(n < 0 for n in column.shape) or expected != len(column.data):
        raise InvalidArgument(
            f"column {column.name}: shape {list(column.shape)} of {dtype} is {expected} bytes, not {len(column.data)}"
        )
    return np.frombuffer(column.data, dtype=dtype).reshape(tuple(column.shape))


def to_json(value: Mapping[str, Any]) -> str:
    """Compact JSON with sorted keys; empty for an empty mapping, so equal content has equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if value else ""


def from_json(text: str) -> dict[str, Any]:
    """The mapping behind `to_json`. Raises InvalidArgument unless it is a JSON object."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"not JSON: {text[:80]!r}: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"must be a JSON object, got {text[:80]!r}")
    return value
