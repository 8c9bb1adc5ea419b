"""A put's payload: its columns, and the checks that let a trainer read it. `headrace.trajectory` has the rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.limits import from_json
from headrace.protobuf import Payload, fields, read_varint
from headrace.trajectory import (
    COLUMN_DTYPES,
    DTYPES,
    LOSS_MASK,
    ROLLOUT_LOG_PROBS,
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    SAMPLING_MASK_COUNTS,
    TEACHER_LOG_PROBS,
    TOKENS,
    check_experts,
    check_log_probs,
    check_loss_mask,
    check_ranges,
    check_reward,
    check_row,
    check_sampling_mask,
    check_shape,
    check_token_ids,
    gaps,
    parsed_payload,
)

# The columns of a payload, without copies where it is large: they are slices of it. A large payload is walked by the
# headers of its fields. What is not encoded as every encoder writes it is parsed by the generated class.

Column = tuple[str, int, tuple[int, ...], Payload]
"""(name, dtype, shape, data)."""

_PARSED_BYTES = 16 << 10
"""Up to this size the generated class is faster than a walk, and its copies cost little."""
_JSON_TAGS = frozenset((4 << 3 | 2, 5 << 3 | 2, 7 << 3 | 2, 8 << 3 | 2))
_TEXT_TAGS = frozenset((1 << 3 | 2, 2 << 3 | 2, 3 << 3 | 2)) | _JSON_TAGS
_COLUMN_TAG = 6 << 3 | 2
_NAME_TAG, _DTYPE_TAG, _SHAPE_TAG, _DATA_TAG = 1 << 3 | 2, 2 << 3, 3 << 3 | 2, 4 << 3 | 2
"""Of a column."""


def columns_of(sample_id: str, payload: Payload) -> list[Column]:
    """The columns of a payload. Raises InvalidArgument for bytes that are no payload, or if its JSON is no object."""
    if len(payload) > _PARSED_BYTES:
        with suppress(IndexError, ValueError):  # not protobuf, or not as every encoder writes it
            return list(_walked(memoryview(payload)))
    message = parsed_payload(sample_id, bytes(payload))
    texts = message.metadata_json, message.sampling_params_json, message.train_metadata_json, message.hook_json
    for text in texts:
        if text:
            from_json(text)
    return [(column.name, column.dtype, tuple(column.shape[:]), column.data) for column in message.columns]


def _walked(data: memoryview) -> Iterator[Column]:
    for tag, _, start, end in fields(data, 0, len(data)):
        if tag == _COLUMN_TAG:
            yield _column(data[start:end])
        elif tag in _TEXT_TAGS:
            text = str(data[start:end], "utf-8")
            if tag in _JSON_TAGS:
                from_json(text)
        else:
            raise ValueError(f"the field of the tag {tag}")


def _column(view: memoryview) -> Column:
    name, dtype, shape, data = "", 0, list[int](), view[:0]
    for tag, _, start, end in fields(view, 0, len(view)):
        if tag == _NAME_TAG:
            name = str(view[start:end], "utf-8")
        elif tag == _DTYPE_TAG:
            dtype, _ = read_varint(view, start)
        elif tag == _SHAPE_TAG:
            while start < end:
                length, start = read_varint(view, start)
                shape.append(length)
        elif tag == _DATA_TAG:
            data = view[start:end]
        else:
            raise ValueError("a column of other fields")
    return name, dtype, tuple(shape), data


# A put's payload is checked here, so that a trainer can read it; `headrace.trajectory` has the rules.
# The values of small columns are checked many samples at a time, because a call of numpy costs more than a short row
# does; when a check fails, each sample is checked alone, so that the answer names the wrong one.

_Envelope = sample_pb2.SampleEnvelope
_REQUIRED = frozenset((TOKENS, LOSS_MASK, ROLLOUT_LOG_PROBS))
_SAMPLED = (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)
_ALONE_BYTES = 16 << 10
"""A column of this size or more is checked alone, without a copy."""


def check_samples(samples: Iterable[tuple[_Envelope, Payload]], vocab_size: int | None = None) -> None:
    """Raises InvalidArgument for a sample that could not be read back, or not be trained on.

    `vocab_size` bounds the token ids, where it is known. An unfinished sample's tokens need no policy ranges.
    """
    values = _Values(vocab_size)
    for envelope, payload in samples:
        try:
            _check(envelope, payload, values)
        except InvalidArgument as error:
            raise _named(envelope, error) from error
    values.check()


class _Values:
    """Rows of small samples that wait to be checked together."""

    def __init__(self, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size
        self._waiting: defaultdict[str, list[tuple[_Envelope, Payload]]] = defaultdict(list)

    def add(self, name: str, data: Payload, envelope: _Envelope) -> None:
        """A row of the right dtype and length."""
        if len(data) < _ALONE_BYTES:
            self._waiting[name].append((envelope, data))
        else:
            self._check(name, data)

    def check(self) -> None:
        """Raises InvalidArgument that names the sample."""
        for name, rows in self._waiting.items():
            try:
                self._check(name, b"".join([data for _, data in rows]))
            except InvalidArgument:
                self._check_each(name, rows)
                raise

    def _check_each(self, name: str, rows: Sequence[tuple[_Envelope, Payload]]) -> None:
        for envelope, data in rows:
            try:
                self._check(name, data)
            except InvalidArgument as error:
                raise _named(envelope, error) from error

    def _check(self, name: str, data: Payload) -> None:
        values = np.frombuffer(data, COLUMN_DTYPES[name])
        if name == TOKENS:
            check_token_ids(name, values, self._vocab_size)
        elif name == LOSS_MASK:
            check_loss_mask(name, values)
        else:
            check_log_probs(name, values)


def _named(envelope: _Envelope, error: InvalidArgument) -> InvalidArgument:
    return InvalidArgument(f"sample {envelope.sample_id}: {error.message}", field="groups.samples", reason="BAD_SAMPLE")


def _check(envelope: _Envelope, payload: Payload, values: _Values) -> None:
    if envelope.HasField("reward"):
        check_reward("reward", envelope.reward)
    if envelope.reward_parts:
        for name, value in envelope.reward_parts.items():
            check_reward(f"reward_parts[{name!r}]", value)
    num_covered = check_ranges("policy_ranges", envelope.policy_ranges, envelope.response_tokens)
    mask = _check_columns(envelope, payload, values)
    if num_covered < envelope.response_tokens and envelope.status in _SAMPLED:
        _check_versions(envelope, mask)


def _check_columns(envelope: _Envelope, payload: Payload, values: _Values) -> Payload | None:
    """The loss mask, unless it lies out of line: of those columns the envelope and the header agree."""
    outside = {column.name: column.num_bytes for column in envelope.out_of_line} if envelope.out_of_line else {}
    prompt_tokens, response_tokens = envelope.prompt_tokens, envelope.response_tokens
    lengths = _lengths(prompt_tokens + response_tokens, response_tokens)
    columns = columns_of(envelope.sample_id, payload)
    mask: Payload | None = None
    for name, dtype, shape, data in columns:
        if name in outside:
            _check_outside(name, dtype, shape, data, outside[name], lengths)
            continue
        if not _is_row(name, dtype, shape, data, lengths):
            _check_other(name, dtype, shape, data, lengths)
            continue
        values.add(name, data, envelope)
        if name == LOSS_MASK:
            mask = data
    _check_names([column[0] for column in columns], outside)
    if any(column[0] in _SAMPLING_MASK for column in columns):
        _check_sampling_mask(columns, outside, response_tokens)
    if not (prompt_tokens or response_tokens or envelope.status == sample_pb2.SAMPLE_STATUS_FAILED):
        raise InvalidArgument("prompt_tokens and response_tokens are 0: a sample has a prompt or a response")
    if mask is not None and (trained := len(mask) - bytes(mask).count(0)) != envelope.trained_tokens:
        raise InvalidArgument(f"trained_tokens is {envelope.trained_tokens}, loss_mask has {trained}")
    return mask


_SAMPLING_MASK = frozenset((SAMPLING_MASK, SAMPLING_MASK_COUNTS))


def _check_sampling_mask(columns: Sequence[Column], outside: Mapping[str, int], response_tokens: int) -> None:
    """Checks it against the response, unless a column of theirs lies out of line."""
    if outside.keys() & {*_SAMPLING_MASK, TOKENS}:
        return
    of_them = [column for column in columns if column[0] in _SAMPLING_MASK or column[0] == TOKENS]
    arrays = {name: np.frombuffer(data, DTYPES[dtype]).reshape(shape) for name, dtype, shape, data in of_them}
    tokens = arrays.pop(TOKENS)
    check_sampling_mask("", tokens[len(tokens) - response_tokens :], arrays)


_Lengths = Mapping[str, int]


def _lengths(num_tokens: int, response_tokens: int) -> _Lengths:
    """Returns how many entries the columns with one for each token must have."""
    return {TOKENS: num_tokens, **dict.fromkeys((LOSS_MASK, ROLLOUT_LOG_PROBS, TEACHER_LOG_PROBS), response_tokens)}


def _is_row(name: str, dtype: int, shape: tuple[int, ...], data: Payload, lengths: _Lengths) -> bool:
    """True for a column with one entry for each token that has the right type and size."""
    if name not in lengths or dtype not in DTYPES:
        return False
    kind, length = COLUMN_DTYPES[name], lengths[name]
    return DTYPES[dtype] == kind and shape == (length,) and len(data) == length * kind.itemsize


def _check_names(names: Sequence[str], outside: Mapping[str, int]) -> None:
    seen = set(names)
    if len(seen) < len(names):
        raise InvalidArgument(f"some of the columns {sorted(names)[:100]} come twice")
    if not (seen >= _REQUIRED and seen >= outside.keys()):
        raise InvalidArgument(f"the payload lacks the columns {sorted((_REQUIRED | outside.keys()) - seen)}")


def _check_other(name: str, number: int, shape: tuple[int, ...], data: Payload, lengths: _Lengths) -> None:
    """A column that is no row as it should be: it has a name that says nothing here, or another rank by right."""
    dtype = _dtype(name, number)
    check_shape(name, dtype, shape, len(data))
    if name in COLUMN_DTYPES:
        values: NDArray[Any] = np.frombuffer(data, dtype).reshape(shape)
        if name == ROUTED_EXPERTS:
            check_experts(name, values, lengths[TOKENS])
        else:
            check_row(name, values, lengths.get(name))


def _check_outside(
    name: str, number: int, shape: tuple[int, ...], data: Payload, num_bytes: int, lengths: _Lengths
) -> None:
    """A column out of line: what can be known without its bytes."""
    dtype = _dtype(name, number)
    check_shape(name, dtype, shape, num_bytes)
    if len(data):
        raise InvalidArgument(f"column {name} is out of line, but has {len(data)} bytes in the payload, too")
    if name not in COLUMN_DTYPES:
        return
    rank, length = 1, lengths[LOSS_MASK]
    if name == ROUTED_EXPERTS:
        rank, length = 3, max(lengths[TOKENS] - 1, 0)
    elif name == SAMPLING_MASK:
        length = shape[0]  # its counts say it
    elif name in lengths:
        length = lengths[name]
    if (dtype, len(shape)) != (COLUMN_DTYPES[name], rank) or shape[0] != length:
        raise InvalidArgument(
            f"column {name} is {dtype} {list(shape)}, must be {COLUMN_DTYPES[name]} of {length} tokens"
        )


def _dtype(name: str, number: int) -> np.dtype[Any]:
    if number not in DTYPES:
        raise InvalidArgument(f"column {name} has the unknown dtype {number}")
    return DTYPES[number]


def _check_versions(envelope: _Envelope, mask: Payload | None) -> None:
    """Every trained token was sampled by some policy; where the mask lies out of line, every token."""
    for start, end in gaps(envelope.policy_ranges, envelope.response_tokens):
        if mask is None or bytes(mask[start:end]).count(0) < end - start:
            raise InvalidArgument(
                f"policy_ranges do not cover the response's tokens [{start}, {end}), which are trained"
            )
