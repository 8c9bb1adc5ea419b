"""One sample: what the policy did, frozen, with the only checks of its values, its columns and its encoding.

Lengths: T = len(tokens) = prompt + response, R = response_length = len(loss_mask) = len(rollout_log_probs).
Every check takes a name and the value, and raises InvalidArgument with both: engines, hooks, teachers, scorers, the
ledger and the trainer call the same ones. `Sample` calls them when it is constructed; callers that know the model use
`ModelBounds` as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any, Protocol

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.digest import digest_of, matches
from headrace.errors import DataLoss, InvalidArgument
from headrace.limits import MAX_COLUMN_BYTES, MAX_COLUMN_RANK, MAX_COUNTER, from_json, to_json
from headrace.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class PolicyRange:
    """Response tokens [start, end) were sampled under `policy_version`."""

    policy_version: int
    start: int
    end: int
    masked: bool = False
    """None of them is trained: their age does not count."""


class Range(Protocol):
    """The fields that a `PolicyRange` and its message share."""

    @property
    def policy_version(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def check_ranges(name: str, ranges: Iterable[Range], response_length: int) -> int:
    """Returns the number of tokens that the ranges cover.

    Raises InvalidArgument unless they are in order, do not overlap, and lie in the response.
    """
    end = num_covered = 0
    for number, one in enumerate(ranges):
        version, start, after, end = one.policy_version, one.start, end, one.end
        if not (0 <= version <= MAX_COUNTER and after <= start < end <= response_length):
            raise _misplaced(
                f"{name}[{number}] is [{start}, {end}) of version {version}", version, after, response_length
            )
        num_covered += end - start
    return num_covered


def _misplaced(where: str, version: int, after: int, response_length: int) -> InvalidArgument:
    if not 0 <= version <= MAX_COUNTER:
        return InvalidArgument(f"{where}: versions must be 0 to {MAX_COUNTER}")
    return InvalidArgument(f"{where}, after {after}, of a response of {response_length} tokens: order them by start")


def gaps(ranges: Iterable[Range], response_length: int) -> Iterator[tuple[int, int]]:
    """Yields the response's tokens [start, end) that no range covers. The ranges must have been checked."""
    at = 0
    for one in ranges:
        if one.start > at:
            yield at, one.start
        at = one.end
    if at < response_length:
        yield at, response_length


TOKENS = "tokens"
LOSS_MASK = "loss_mask"
ROLLOUT_LOG_PROBS = "rollout_log_probs"
TEACHER_LOG_PROBS = "teacher_log_probs"
ROUTED_EXPERTS = "rollout_routed_experts"
"""Column int16 [T - 1, layers, experts of a token]: where engines sent each token but the last; -1 where unknown."""
SAMPLING_MASK = "sampling_mask"
"""Column int32: the token ids that the engine sampled a response token from, one response token behind the other."""
SAMPLING_MASK_COUNTS = "sampling_mask_counts"
"""Column int32 [R] beside it: how many ids each has; 0 where a token was sampled from all, or not sampled."""

COLUMN_DTYPES: Mapping[str, np.dtype[Any]] = {
    TOKENS: np.dtype("<i4"),
    LOSS_MASK: np.dtype("<u1"),
    ROLLOUT_LOG_PROBS: np.dtype("<f4"),
    TEACHER_LOG_PROBS: np.dtype("<f4"),
    ROUTED_EXPERTS: np.dtype("<i2"),
    SAMPLING_MASK: np.dtype("<i4"),
    SAMPLING_MASK_COUNTS: np.dtype("<i4"),
}
_largest, _smallest = np.maximum.reduce, np.minimum.reduce
"""The maximum and minimum of a flat array in half the time of `max` and `min`: every sample that is put passes here."""

_NUMBERS = (float, int, np.integer, np.floating)
MAX_REWARD = 1e6
LOG_PROB_SLACK = 1e-3
"""How far above 0 a log-probability may be: float32's x - logsumexp(x) of logits in the thousands rounds by that."""
MIN_LOG_PROB = -1e4
"""A token that was sampled has never had less: of float32 logits, probabilities below e^-10000 come of broken numbers,
and the importance ratio of such a token is infinite."""
MAX_INDEX = (1 << 32) - 1


def check_text(name: str, value: object) -> None:
    """Requires a str that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {_shown(value)}, must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} cannot be encoded as UTF-8: {error}") from error


def check_index(name: str, value: object) -> None:
    """Requires an integer that fits uint32."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INDEX:
        raise InvalidArgument(f"{name} is {_shown(value)}, must be an integer of 0 or more")


def check_reward(name: str, value: object) -> None:
    """Requires a finite number of at most MAX_REWARD in size."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise InvalidArgument(f"{name} is {_shown(value)}, must be a number")
    if not -MAX_REWARD <= value <= MAX_REWARD:  # nor is NaN
        raise InvalidArgument(f"{name} is {_shown(value)}, must be finite and at most {MAX_REWARD:g} in size")


def check_row(name: str, values: object, length: int | None = None) -> None:
    """Requires a one-dimensional array of the column's dtype, and of `length` if it is given."""
    column = name.rpartition(" ")[2]
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        shape = list(values.shape) if isinstance(values, np.ndarray) else type(values).__name__
        raise InvalidArgument(f"{name} is {shape}, must be one row of {COLUMN_DTYPES[column]}")
    if values.dtype != COLUMN_DTYPES[column]:
        raise InvalidArgument(f"{name} has dtype {values.dtype}, must have {COLUMN_DTYPES[column]}")
    if length is not None and len(values) != length:
        raise InvalidArgument(f"{name} has {len(values)} entries, must have {length}: one for each response token")


def check_loss_mask(name: str, mask: NDArray[Any]) -> None:
    """Requires 0 or 1 everywhere."""
    if len(mask) and _largest(mask) > 1:
        raise InvalidArgument(f"{name}{_place(mask > 1)} is {mask.max()}, must be 0 or 1")


def check_log_probs(name: str, values: NDArray[Any]) -> None:
    """Requires natural logarithms of probabilities: not above 0, and not below MIN_LOG_PROB."""
    if not len(values):
        return
    largest = _largest(values)  # NaN where there is one
    if largest <= LOG_PROB_SLACK and _smallest(values) >= MIN_LOG_PROB:
        return
    wrong = ~((values >= MIN_LOG_PROB) & (values <= LOG_PROB_SLACK))
    raise InvalidArgument(f"{name}{_place(wrong)} is {values[wrong][0]}, must be {MIN_LOG_PROB:g} to 0")


def check_token_ids(name: str, tokens: NDArray[Any], vocab_size: int | None = None) -> None:
    """Requires ids of a vocabulary; of `vocab_size` if it is known."""
    if not len(tokens):
        return
    end = vocab_size if vocab_size is not None else 1 << 31
    if _smallest(tokens) >= 0 and _largest(tokens) < end:
        return
    wrong = (tokens < 0) | (tokens >= end)
    raise InvalidArgument(f"{name}{_place(wrong)} is {tokens[wrong][0]}, not an id of a vocabulary of {end}")


def check_token_rows(
    prefix: str, tokens: NDArray[Any], loss_mask: NDArray[Any], rollout_log_probs: NDArray[Any]
) -> None:
    """Requires token ids, and a mask and log-probs of the last of them. `prefix` stands before the columns' names."""
    check_row(f"{prefix}{TOKENS}", tokens)
    check_token_ids(f"{prefix}{TOKENS}", tokens)
    check_row(f"{prefix}{LOSS_MASK}", loss_mask)
    check_loss_mask(f"{prefix}{LOSS_MASK}", loss_mask)
    if len(loss_mask) > len(tokens):
        raise InvalidArgument(f"{prefix}{LOSS_MASK} has {len(loss_mask)} entries, more than the {len(tokens)} tokens")
    check_row(f"{prefix}{ROLLOUT_LOG_PROBS}", rollout_log_probs, len(loss_mask))
    check_log_probs(f"{prefix}{ROLLOUT_LOG_PROBS}", rollout_log_probs)


def check_experts(name: str, experts: object, num_tokens: int) -> None:
    """Requires int16 [num_tokens - 1, layers, experts of a token], -1 where unknown."""
    dtype = COLUMN_DTYPES[ROUTED_EXPERTS]
    if not isinstance(experts, np.ndarray) or experts.dtype != dtype or experts.ndim != 3:
        raise InvalidArgument(f"{name} is {_shown_array(experts)}, must be {dtype} [tokens - 1, layers, top-k]")
    if len(experts) != max(num_tokens - 1, 0):
        raise InvalidArgument(f"{name} has {len(experts)} tokens, must have {num_tokens - 1}: all but the last")
    if experts.size and experts.min() < -1:
        raise InvalidArgument(f"{name} has {experts.min()}, must be an expert's number, or -1 for unknown")


def check_sampling_mask(prefix: str, response: NDArray[Any], columns: Mapping[str, NDArray[Any]]) -> None:
    """Requires both columns, and each response token in its own set. `prefix` stands before the columns' names."""
    mask, counts = columns.get(SAMPLING_MASK), columns.get(SAMPLING_MASK_COUNTS)
    if mask is None or counts is None:
        raise InvalidArgument(
            f"{prefix}{SAMPLING_MASK} and {SAMPLING_MASK_COUNTS}: one of them is missing, give both or none"
        )
    check_row(f"{prefix}{SAMPLING_MASK}", mask)
    check_token_ids(f"{prefix}{SAMPLING_MASK}", mask)
    check_row(f"{prefix}{SAMPLING_MASK_COUNTS}", counts, len(response))
    total = int(counts.sum(dtype=np.int64))
    if (len(counts) and _smallest(counts) < 0) or total != len(mask):
        raise InvalidArgument(
            f"{prefix}{SAMPLING_MASK_COUNTS} are {total} together, 0 or more each: {SAMPLING_MASK} has {len(mask)} ids"
        )
    owners = np.repeat(np.arange(len(counts)), counts)
    is_held = counts == 0
    is_held[owners[mask == response[owners]]] = True
    if not is_held.all():
        place = int(np.flatnonzero(~is_held)[0])
        raise InvalidArgument(f"{prefix}{SAMPLING_MASK} of response token {place} lacks that token, {response[place]}")


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Limits that a model sets for token ids and routed experts."""

    vocab_size: int
    num_layers: int
    num_experts: int | None = None
    experts_per_token: int | None = None

    @classmethod
    def of(cls, architecture: Architecture) -> ModelBounds:
        experts = architecture.experts
        return cls(
            architecture.vocab_size,
            architecture.num_layers,
            experts.count if experts else None,
            experts.topk if experts else None,
        )

    def check(self, sample_id: str, tokens: NDArray[Any], columns: Mapping[str, NDArray[Any]]) -> None:
        """Raises InvalidArgument for token ids and experts that the model does not have."""
        check_token_ids(f"sample {sample_id}: {TOKENS}", tokens, self.vocab_size)
        if (mask := columns.get(SAMPLING_MASK)) is not None:
            check_token_ids(f"sample {sample_id}: {SAMPLING_MASK}", mask, self.vocab_size)
        experts = columns.get(ROUTED_EXPERTS)
        if experts is None or self.num_experts is None:
            return
        name = f"sample {sample_id}: {ROUTED_EXPERTS}"
        if experts.shape[1:] != (self.num_layers, self.experts_per_token):
            raise InvalidArgument(
                f"{name} is {list(experts.shape)}, must be {[len(tokens) - 1, self.num_layers, self.experts_per_token]}"
            )
        if experts.size and experts.max() >= self.num_experts:
            raise InvalidArgument(f"{name} has expert {experts.max()}, the model has {self.num_experts} experts")


def _place(wrong: NDArray[Any]) -> str:
    return f"[{int(np.flatnonzero(wrong)[0])}]"


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
    return text[:80]


def _shown_array(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


DTYPES: Mapping[int, np.dtype[Any]] = {
    pb.DTYPE_UINT8: np.dtype("<u1"),
    pb.DTYPE_INT16: np.dtype("<i2"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_FLOAT64: np.dtype("<f8"),
}
_NUMBER_OF_DTYPE: Mapping[np.dtype[Any], pb.Dtype.ValueType] = {
    dtype: pb.Dtype.ValueType(number) for number, dtype in DTYPES.items()
}


def pack_column(name: str, array: NDArray[Any]) -> pb.Column:
    """An array as raw little-endian bytes. Raises InvalidArgument for a dtype off the whitelist."""
    number = _NUMBER_OF_DTYPE.get(array.dtype.newbyteorder("<"))
    if number is None:
        allowed = ", ".join(str(d) for d in _NUMBER_OF_DTYPE)
        raise InvalidArgument(f"column {name}: dtype {array.dtype} cannot travel; use one of {allowed}")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return pb.Column(name=name, dtype=number, shape=array.shape, data=little.tobytes())


def unpack_column(column: pb.Column) -> NDArray[Any]:
    """The array of a column (read-only, no copy). Raises InvalidArgument when shape, dtype and bytes disagree."""
    dtype, shape = DTYPES.get(column.dtype), tuple(column.shape)
    if dtype is None:
        raise InvalidArgument(f"column {column.name}: dtype {column.dtype} is not known here")
    check_shape(column.name, dtype, shape, len(column.data))
    return np.frombuffer(column.data, dtype=dtype).reshape(shape)


def check_shape(name: str, dtype: np.dtype[Any], shape: Sequence[int], num_bytes: int) -> None:
    """Raises InvalidArgument unless an array of this shape has exactly these bytes. No product overflows."""
    if len(shape) == 1 and shape[0] * dtype.itemsize == num_bytes:
        return
    if len(shape) <= MAX_COLUMN_RANK and min(shape, default=0) >= 0:
        elements = prod(shape)
        if elements * dtype.itemsize == num_bytes and (elements or prod(n or 1 for n in shape) <= MAX_COLUMN_BYTES):
            return  # numpy refuses shapes of no elements by their other dimensions
    raise InvalidArgument(
        f"column {name}: shape {[str(n)[:20] for n in shape[:MAX_COLUMN_RANK]]} of {dtype} is no array of {num_bytes} "
        f"bytes; {MAX_COLUMN_RANK} dimensions at most"
    )


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
        check_token_rows(f"{name} ", self.tokens, self.loss_mask, self.rollout_log_probs)
        total = len(self.tokens)
        if not total and self.status is not Status.FAILED:
            raise InvalidArgument(f"{name} {TOKENS} is empty: a sample needs a prompt or a response")
        if (teacher := self.columns.get(TEACHER_LOG_PROBS)) is not None:
            check_row(f"{name} {TEACHER_LOG_PROBS}", teacher, self.response_length)
            check_log_probs(f"{name} {TEACHER_LOG_PROBS}", teacher)
        if (experts := self.columns.get(ROUTED_EXPERTS)) is not None:
            check_experts(f"{name} {ROUTED_EXPERTS}", experts, total)
        if SAMPLING_MASK in self.columns or SAMPLING_MASK_COUNTS in self.columns:
            check_sampling_mask(f"{name} ", self.tokens[self.prompt_length :], self.columns)

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


ROLE = "role"
"""The tag of a sample of one of several agents of a task."""
TURNS = "turns"
"""The key of a sample's hook_fields that holds them."""
_MAX_CHARACTERS = 200_000
_MAX_TURNS = 1_000
_CUT = " … "

_IS_CUT = "is_cut"

Turn = dict[str, str]


def turn_of(message: Mapping[str, Any]) -> Turn:
    """A message with its content as text; calls of tools stand behind it as JSON."""
    content, calls = message.get("content"), message.get("tool_calls") or ()
    said = [_text(content)] if content else []
    said += [_called(call) if isinstance(call, Mapping) else str(call) for call in calls]
    return {"role": str(message.get("role", "")), "content": "\n".join(said)}


def _called(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return _text(call)
    return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {_text(function.get("arguments"))}}}'


def bounded_turns(turns: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of at most 200,000 characters together, with their calls of tools.

    Of more, longer texts lose their middle, the oldest go first, and all are marked.
    """
    messages = list(turns)
    shown = [turn_of(message) for message in messages[-_MAX_TURNS:]]
    room = _MAX_CHARACTERS // max(1, len(shown))
    is_short = sum(len(turn["content"]) for turn in shown) <= _MAX_CHARACTERS
    if is_short and len(messages) <= _MAX_TURNS and not _is_cut(messages):
        return [_kept(message) for message in messages]
    return [
        {**turn, "content": turn["content"] if is_short else _shortened(turn["content"], room), _IS_CUT: True}
        for turn in shown
    ]


LEFT_OUT = ({_IS_CUT: True},)
"""Turns that stand for a conversation that is too long to be sent."""


def _is_cut(turns: Iterable[Mapping[str, Any]]) -> bool:
    return any(turn.get(_IS_CUT) for turn in turns)


def whole_conversation(hook_fields: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The messages of a sample, with role, content, and calls of tools; none of a response to a plain text.

    Raises InvalidArgument where some were left out.
    """
    found = hook_fields.get(TURNS)
    if not isinstance(found, list) or not all(isinstance(turn, Mapping) for turn in found):
        return ()
    if _is_cut(found):
        raise InvalidArgument(
            f"the conversation is too long to be scored whole, with more than {_MAX_CHARACTERS} characters: lower "
            "--max-turns or --rollout-max-response-len"
        )
    return [_kept(turn) for turn in found]


def _kept(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls") or ()
    if not all(isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls):
        return turn_of(message)
    kept: dict[str, Any] = turn_of({**message, "tool_calls": ()})
    if calls:
        kept["tool_calls"] = [
            {
                "id": str(call.get("id", "")),
                "function": {name: _text(call["function"].get(name)) for name in ("name", "arguments")},
            }
            for call in calls
        ]
    if "tool_call_id" in message:
        kept["tool_call_id"] = str(message["tool_call_id"])
    return kept


def turns_in(hook_fields: Mapping[str, Any]) -> Sequence[Turn]:
    """The turns of a sample, as people read them; none where another producer has written something else there."""
    found = hook_fields.get(TURNS)
    if not isinstance(found, list) or not all(isinstance(turn, Mapping) for turn in found):
        return ()
    return [turn_of(turn) for turn in found]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return str(content)
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "".join(str(part["text"]) if "text" in part else f"<{part.get('type')}>" for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def _shortened(text: str, room: int) -> str:
    half = max(1, (room - len(_CUT)) // 2)
    return text if len(text) <= room else f"{text[:half]}{_CUT}{text[-half:]}"
