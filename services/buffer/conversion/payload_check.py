"""A put's payload is checked here, so that a trainer can read it; `headrace.sample_checks` has the rules.

The values of small columns are checked many samples at a time, because a call of numpy costs more than a short row
does; when a check fails, each sample is checked alone, so that the answer names the wrong one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.policy_range import check_ranges, gaps
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
from headrace.wire.column import DTYPES, check_shape
from headrace.wire.protobuf import Payload
from services.buffer.conversion.payload_columns import TokenRow, columns_of, row_of

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
    rows = _rows(prompt_tokens + response_tokens, response_tokens)
    columns = columns_of(envelope.sample_id, payload, tuple(rows.values()))
    mask: Payload | None = None
    for name, dtype, shape, data in columns:
        if name in outside:
            _check_outside(name, dtype, shape, data, outside[name], rows)
            continue
        row = rows.get(name)
        if row is None or dtype != row.dtype or shape != row.shape or len(data) != row.num_bytes:
            _check_other(name, dtype, shape, data, rows)
            continue
        values.add(name, data, envelope)
        if name == LOSS_MASK:
            mask = data
    _check_names([column[0] for column in columns], outside)
    if not (prompt_tokens or response_tokens or envelope.status == sample_pb2.SAMPLE_STATUS_FAILED):
        raise InvalidArgument("prompt_tokens and response_tokens are 0: a sample has a prompt or a response")
    if mask is not None and (trained := len(mask) - bytes(mask).count(0)) != envelope.trained_tokens:
        raise InvalidArgument(f"trained_tokens is {envelope.trained_tokens}, loss_mask has {trained}")
    return mask


_Rows = Mapping[str, TokenRow]


def _rows(num_tokens: int, response_tokens: int) -> _Rows:
    """Returns what the columns with one entry per token must be, in the order in which producers write them."""
    return {
        TOKENS: row_of(TOKENS, num_tokens),
        LOSS_MASK: row_of(LOSS_MASK, response_tokens),
        ROLLOUT_LOG_PROBS: row_of(ROLLOUT_LOG_PROBS, response_tokens),
        TEACHER_LOG_PROBS: row_of(TEACHER_LOG_PROBS, response_tokens),
    }


def _check_names(names: Sequence[str], outside: Mapping[str, int]) -> None:
    seen = set(names)
    if len(seen) < len(names):
        raise InvalidArgument(f"some of the columns {sorted(names)[:100]} come twice")
    if not (seen >= _REQUIRED and seen >= outside.keys()):
        raise InvalidArgument(f"the payload lacks the columns {sorted((_REQUIRED | outside.keys()) - seen)}")


def _check_other(name: str, number: int, shape: tuple[int, ...], data: Payload, rows: _Rows) -> None:
    """A column that is no row as it should be: it has a name that says nothing here, or another rank by right."""
    dtype = _dtype(name, number)
    check_shape(name, dtype, shape, len(data))
    if name in COLUMN_DTYPES:
        values: NDArray[Any] = np.frombuffer(data, dtype).reshape(shape)
        if name == ROUTED_EXPERTS:
            check_experts(name, values, rows[TOKENS].shape[0])
        else:
            check_row(name, values, rows[name].shape[0])


def _check_outside(name: str, number: int, shape: tuple[int, ...], data: Payload, num_bytes: int, rows: _Rows) -> None:
    """A column out of line: what can be known without its bytes."""
    dtype = _dtype(name, number)
    check_shape(name, dtype, shape, num_bytes)
    if len(data):
        raise InvalidArgument(f"column {name} is out of line, but has {len(data)} bytes in the payload, too")
    if name not in COLUMN_DTYPES:
        return
    length = max(rows[TOKENS].shape[0] - 1, 0) if name == ROUTED_EXPERTS else rows[name].shape[0]
    rank = 3 if name == ROUTED_EXPERTS else 1
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
