"""A transaction as rows in MessagePack, which `sqlite` and `postgres` write and read.

A group's row is written at each of its transitions, so it holds neither its prompt nor its samples' envelopes, only the
keys of the samples: those have rows of their own, written once, when their payload arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from services.buffer.ledger.group import Group, Prompt, SampleRecord
from services.buffer.ledger.stream import StreamState
from services.buffer.ledger.transaction import LedgerEvent, Transaction

_NAMES = tuple(name for name in Group.__struct_fields__ if name not in ("prompt", "samples", "partials"))
_values = attrgetter(*_NAMES)
_encode = msgspec.msgpack.Encoder().encode
_NO_PROMPT = Prompt("", b"")


Row = tuple[str, bytes]
"""A key and its body."""


class TransactionRows(msgspec.Struct, frozen=True, gc=False):
    """Everything that a transaction writes and deletes, except the payloads' bytes."""

    streams: list[Row]
    groups: list[Row]
    prompts: list[Row]
    samples: list[list[SampleRecord]]
    """Records whose payloads are in the transaction, one list for each group."""
    events: list[tuple[int, bytes]]
    """(position, body)."""
    deleted: list[str]
    """Keys of samples that no group has any more."""
    forgotten: list[str]
    """Groups that are deleted with their prompts."""
    events_from: int | None = None
    """Events below this position are deleted."""


class _GroupBody(msgspec.Struct, array_like=True, frozen=True):
    group: Group
    samples: list[str]
    partials: list[str]


_group_decoder = msgspec.msgpack.Decoder(_GroupBody)
_sample_decoder = msgspec.msgpack.Decoder(SampleRecord)
_samples_decoder = msgspec.msgpack.Decoder(list[SampleRecord])
_prompt_decoder = msgspec.msgpack.Decoder(Prompt)
_stream_decoder = msgspec.msgpack.Decoder(StreamState)
_event_decoder = msgspec.msgpack.Decoder(LedgerEvent)


def to_rows(transaction: Transaction) -> TransactionRows:
    """Writes only the latest version of each group."""
    groups = transaction.groups.values()
    return TransactionRows(
        streams=[(state.name, _encode(state)) for state in transaction.streams.values()],
        groups=[(group.group_id, _group_body(group)) for group in groups],
        prompts=[(group_id, _encode(transaction.groups[group_id].prompt)) for group_id in transaction.new_groups],
        samples=_new_samples(transaction) if transaction.payloads else [],
        events=[(event.position, _encode(event)) for event in transaction.events],
        deleted=_deleted_samples(transaction) if transaction.deleted_payloads or transaction.forgotten else [],
        forgotten=[group.group_id for group in transaction.forgotten],
        events_from=transaction.events_from,
    )


def _new_samples(transaction: Transaction) -> list[list[SampleRecord]]:
    payloads = transaction.payloads
    new = [
        [record for record in (*group.samples, *group.partials) if record.key in payloads]
        for group in transaction.groups.values()
    ]
    return [records for records in new if records]


def _deleted_samples(transaction: Transaction) -> list[str]:
    """Returns the keys to delete; a group that ended may still name samples whose payloads are deleted."""
    named = {record.key for group in transaction.groups.values() for record in (*group.samples, *group.partials)}
    forgotten = [record.key for group in transaction.forgotten for record in group.samples]
    return [*(key for key in transaction.deleted_payloads if key not in named), *forgotten]


def sample_keys(body: bytes) -> list[str]:
    """Returns the keys of the samples that a group's row names, in the order in which they were put."""
    return _group_decoder.decode(body).samples


def load_group(body: bytes, prompt: Prompt, records: Mapping[str, SampleRecord]) -> Group:
    """Raises KeyError naming the sample that `records` lacks."""
    row = _group_decoder.decode(body)
    samples, partials = (tuple(records[key] for key in keys) for keys in (row.samples, row.partials))
    return replace(row.group, prompt=prompt, samples=samples, partials=partials)


def load_sample(body: bytes) -> SampleRecord:
    return _sample_decoder.decode(body)


def dump_sample(record: SampleRecord) -> bytes:
    return _encode(record)


def dump_samples(records: Sequence[SampleRecord]) -> bytes:
    """Packs several samples into one row."""
    return _encode(records)


def load_samples(body: bytes) -> list[SampleRecord]:
    return _samples_decoder.decode(body)


def load_prompt(body: bytes) -> Prompt:
    return _prompt_decoder.decode(body)


def load_stream(body: bytes) -> StreamState:
    return _stream_decoder.decode(body)


def load_event(body: bytes) -> LedgerEvent:
    return _event_decoder.decode(body)


def _group_body(group: Group) -> bytes:
    named: dict[str, Any] = dict(zip(_NAMES, _values(group), strict=True))
    named["prompt"] = _NO_PROMPT
    return _encode((named, [r.key for r in group.samples], [r.key for r in group.partials]))
