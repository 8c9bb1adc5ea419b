"""What a put's payload must be so that a trainer can read it, checked without copying a column.

The payload is walked field by field, as `wire_bytes` walks the request, and columns stay slices of it. What is not
encoded as every encoder writes it goes through the generated class; the checks are those of `headrace.sample_checks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.api.sample.v1 import sample_pb2
from headrace.column import DTYPES, check_shape
from headrace.errors import InvalidArgument
from headrace.json_text import from_json
from headrace.policy_range import PolicyRange, check_ranges, gaps
from headrace.sample_checks import (
    COLUMN_DTYPES,
    LOSS_MASK,
    ROLLOUT_LOG_PROBS,
    ROUTED_EXPERTS,
    TEACHER_LOG_PROBS,
    TOKENS,
    check_experts,
    check_log_probs,
    check_loss_mask,
    check_reward,
    check_row,
    check_token_ids,
)
from headrace.trajectory import parsed_payload
from services.buffer.transaction import Payload
from services.buffer.wire_bytes import fields, read_varint

_JSON_FIELDS = (4, 5, 7)  # of SamplePayload
_COLUMNS = 6
_NAME, _DTYPE, _SHAPE, _DATA = 1, 2, 3, 4  # of Column
_BYTES = 2  # the wire type
_PARSED_BYTES = 16 << 10
"""Up to here a copy costs less than the walk."""
_REQUIRED = frozenset((TOKENS, LOSS_MASK, ROLLOUT_LOG_PROBS))


class _Column(NamedTuple):
    name: str
    dtype: int
    shape: tuple[int, ...]
    data: Payload


def check_sample(envelope: sample_pb2.SampleEnvelope, payload: Payload, vocab_size: int | None = None) -> None:
    """Raises InvalidArgument for a sample that could not be read back, or not be trained on.

    `vocab_size` bounds the token ids, where it is known. An unfinished sample's tokens need no policy ranges.
    """
    try:
        _check(envelope, payload, vocab_size)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"sample {envelope.sample_id}: {error.message}", field="groups.samples", reason="BAD_SAMPLE"
        ) from error


def _check(envelope: sample_pb2.SampleEnvelope, payload: Payload, vocab_size: int | None) -> None:
    if envelope.HasField("reward"):
        check_reward("reward", envelope.reward)
    for name, value in envelope.reward_parts.items():
        check_reward(f"reward_parts[{name!r}]", value)
    ranges = [PolicyRange(r.policy_version, r.start, r.end, r.masked) for r in envelope.policy_ranges]
    check_ranges("policy_ranges", ranges, envelope.response_tokens)
    mask = _check_columns(envelope, _columns(envelope, payload), vocab_size)
    if envelope.status in _SAMPLED:
        _check_versions(ranges, mask, envelope)


_SAMPLED = (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)


def _check_columns(
    envelope: sample_pb2.SampleEnvelope, columns: Sequence[_Column], vocab_size: int | None
) -> NDArray[Any] | None:
    """The loss mask, unless it lies out of line: of those columns the envelope and the header agree."""
    outside = {column.name: column.num_bytes for column in envelope.out_of_line}
    lengths = _lengths(envelope)
    arrays: dict[str, NDArray[Any]] = {}
    seen: set[str] = set()
    for column in columns:
        dtype = DTYPES.get(column.dtype)
        if dtype is None or column.name in seen:
            raise InvalidArgument(f"column {column.name} comes twice, or is of dtype {column.dtype}, unknown here")
        seen.add(column.name)
        num_bytes = outside.get(column.name)
        check_shape(column.name, dtype, column.shape, len(column.data) if num_bytes is None else num_bytes)
        if num_bytes is not None:
            _check_header(column, dtype, lengths)
        elif column.name in COLUMN_DTYPES:
            arrays[column.name] = np.frombuffer(column.data, dtype)
            expected = COLUMN_DTYPES[column.name], (lengths[column.name],)
            if column.name == ROUTED_EXPERTS or (dtype, column.shape) != expected:
                _check_odd(column.name, arrays[column.name].reshape(column.shape), lengths)
    if not (seen >= _REQUIRED and seen >= outside.keys()):
        missing = (_REQUIRED | outside.keys()) - seen
        raise InvalidArgument(f"the payload lacks the columns {sorted(missing)}")
    if not lengths[TOKENS] and envelope.status != sample_pb2.SAMPLE_STATUS_FAILED:
        raise InvalidArgument("prompt_tokens and response_tokens are 0: a sample has a prompt or a response")
    for name, values in arrays.items():
        _check_values(name, values, envelope, vocab_size)
    return arrays.get(LOSS_MASK)


def _check_odd(name: str, values: NDArray[Any], lengths: Mapping[str, int]) -> None:
    """A column that is no row of its dtype and length: raises InvalidArgument, unless it has another rank by right."""
    if name == ROUTED_EXPERTS:
        check_experts(name, values, lengths[TOKENS])
    else:
        check_row(name, values, lengths[name])


def _check_values(name: str, values: NDArray[Any], envelope: sample_pb2.SampleEnvelope, vocab_size: int | None) -> None:
    """Of a column whose shape and dtype were checked."""
    if name == TOKENS:
        check_token_ids(name, values, vocab_size)
    elif name == LOSS_MASK:
        check_loss_mask(name, values)
        if (trained := int(np.count_nonzero(values))) != envelope.trained_tokens:
            raise InvalidArgument(f"trained_tokens is {envelope.trained_tokens}, loss_mask has {trained}")
    elif name != ROUTED_EXPERTS:
        check_log_probs(name, values)


def _lengths(envelope: sample_pb2.SampleEnvelope) -> Mapping[str, int]:
    prompt, response = envelope.prompt_tokens, envelope.response_tokens
    return {
        TOKENS: prompt + response,
        LOSS_MASK: response,
        ROLLOUT_LOG_PROBS: response,
        TEACHER_LOG_PROBS: response,
        ROUTED_EXPERTS: max(prompt + response - 1, 0),
    }


def _check_header(column: _Column, dtype: np.dtype[Any], lengths: Mapping[str, int]) -> None:
    """Of a column out of line: what can be known without its bytes."""
    if column.data:
        raise InvalidArgument(f"column {column.name} lies out of line, and has {len(column.data)} bytes here as well")
    if column.name not in COLUMN_DTYPES:
        return
    rank = 3 if column.name == ROUTED_EXPERTS else 1
    if (dtype, len(column.shape)) != (COLUMN_DTYPES[column.name], rank) or column.shape[0] != lengths[column.name]:
        raise InvalidArgument(
            f"column {column.name} is {dtype} {list(column.shape)}, must be {COLUMN_DTYPES[column.name]} of "
            f"{lengths[column.name]} tokens"
        )


def _check_versions(ranges: list[PolicyRange], mask: NDArray[Any] | None, envelope: sample_pb2.SampleEnvelope) -> None:
    """Every trained token was sampled by some policy; where the mask lies out of line, every token."""
    for start, end in gaps(ranges, envelope.response_tokens):
        if mask is None or mask[start:end].any():
            raise InvalidArgument(
                f"policy_ranges say nothing of the response's tokens [{start}, {end}), which are trained"
            )


def _columns(envelope: sample_pb2.SampleEnvelope, payload: Payload) -> list[_Column]:
    """The columns of a payload whose other fields were checked."""
    if len(payload) > _PARSED_BYTES:
        with suppress(IndexError, ValueError):  # not protobuf, or not as every encoder writes it
            return list(_walked(memoryview(payload)))
    message = parsed_payload(envelope.sample_id, bytes(payload))
    for text in (message.metadata_json, message.sampling_params_json, message.train_metadata_json):
        from_json(text)
    return [_Column(c.name, c.dtype, tuple(c.shape[:]), c.data) for c in message.columns]


def _walked(view: memoryview) -> Iterator[_Column]:
    for number, field, start, end in fields(view, 0, len(view)):
        if view[field] & 7 != _BYTES or not 1 <= number <= 7:
            raise ValueError(f"field {number}")
        if number == _COLUMNS:
            yield _column(view, start, end)
            continue
        text = str(view[start:end], "utf-8")
        if number in _JSON_FIELDS:
            from_json(text)


def _column(view: memoryview, start: int, end: int) -> _Column:
    found: dict[int, Any] = {}
    for number, field, at, stop in fields(view, start, end):
        is_bytes = view[field] & 7 == _BYTES
        if number in found or is_bytes is (number == _DTYPE) or number > _DATA:
            raise ValueError(f"field {number} of a column")
        found[number] = view[at:stop] if is_bytes else read_varint(view, at)[0]
    shape: list[int] = []
    packed = found.get(_SHAPE, b"")
    at = 0
    while at < len(packed):
        length, at = read_varint(packed, at)
        shape.append(length)
    return _Column(str(found.get(_NAME, b""), "utf-8"), found.get(_DTYPE, 0), tuple(shape), found.get(_DATA, b""))
