"""A transaction as rows in MessagePack: what `sqlite` and `postgres` write and read back.

A group's row is written at each of its transitions, so it holds neither its prompt nor its samples' envelopes, only the
keys of the samples: those are rows of their own, written once, when their payload comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from services.buffer.group import Group, Prompt, SampleRecord
from services.buffer.stream import StreamState
from services.buffer.transaction import LedgerEvent, Transaction

_NAMES = tuple(name for name in Group.__struct_fields__ if name not in ("prompt", "samples", "partials"))
_values = attrgetter(*_NAMES)
_encode = msgspec.msgpack.Encoder().encode
_NO_PROMPT = Prompt("", b"")


class GroupRow(msgspec.Struct, array_like=True, frozen=True):
    """`position` orders the versions of a group: the highest counts."""

    group_id: str
    position: int
    body: msgspec.Raw


class SampleRow(msgspec.Struct, array_like=True, frozen=True):
    """`position` is the one of the group's version that brought it."""

    key: str
    position: int
    body: msgspec.Raw


class PromptRow(msgspec.Struct, array_like=True, frozen=True):
    """Written once."""

    group_id: str
    body: msgspec.Raw


class EventRow(msgspec.Struct, array_like=True, frozen=True):
    """One line of the history."""

    position: int
    body: msgspec.Raw


class StreamRow(msgspec.Struct, array_like=True, frozen=True):
    """The latest record of a stream counts."""

    name: str
    body: msgspec.Raw


class Rows(msgspec.Struct, array_like=True, frozen=True):
    """Everything that a transaction writes and deletes, but for the payloads' bytes."""

    streams: list[StreamRow]
    groups: list[GroupRow]
    prompts: list[PromptRow]
    samples: list[SampleRow]
    events: list[EventRow]
    deleted: list[str]
    """Keys of samples that no group has any more."""
    forgotten: list[str]
    """Groups that are no more, nor their prompts."""
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


def to_rows(transaction: Transaction) -> Rows:
    """The samples come in the order of the transaction's payloads."""
    records: dict[str, tuple[int, SampleRecord]] = {}
    for group in transaction.groups.values():
        records.update((r.key, (group.position, r)) for r in (*group.samples, *group.partials))
    return Rows(
        streams=[StreamRow(state.name, _raw(state)) for state in transaction.streams.values()],
        groups=[GroupRow(g.group_id, g.position, _group_body(g)) for g in transaction.groups.values()],
        prompts=[PromptRow(g, _raw(transaction.groups[g].prompt)) for g in transaction.new_groups],
        samples=[SampleRow(key, records[key][0], _raw(records[key][1])) for key in transaction.payloads],
        events=[EventRow(event.position, _raw(event)) for event in transaction.events],
        deleted=[
            *(key for key in transaction.deleted_payloads if key not in records),
            *(record.key for group in transaction.forgotten for record in group.samples),
        ],
        forgotten=[group.group_id for group in transaction.forgotten],
        events_from=transaction.events_from,
    )


def load_group(body: bytes, prompt: Prompt, records: Mapping[str, SampleRecord]) -> Group:
    """Raises KeyError naming the sample that `records` lacks."""
    row = _group_decoder.decode(body)
    samples, partials = (tuple(records[key] for key in keys) for keys in (row.samples, row.partials))
    return replace(row.group, prompt=prompt, samples=samples, partials=partials)


def load_sample(body: bytes) -> SampleRecord:
    """A sample's row."""
    return _sample_decoder.decode(body)


def dump_samples(rows: Sequence[SampleRow]) -> bytes:
    """Several samples' rows as one."""
    return _encode([row.body for row in rows])


def load_samples(body: bytes) -> list[SampleRecord]:
    """The inverse of `dump_samples`."""
    return _samples_decoder.decode(body)


def load_prompt(body: bytes) -> Prompt:
    """A prompt's row."""
    return _prompt_decoder.decode(body)


def load_stream(body: bytes) -> StreamState:
    """A stream's row."""
    return _stream_decoder.decode(body)


def load_event(body: bytes) -> LedgerEvent:
    """An event's row."""
    return _event_decoder.decode(body)


def _group_body(group: Group) -> msgspec.Raw:
    named: dict[str, Any] = dict(zip(_NAMES, _values(group), strict=True))
    named["prompt"] = _NO_PROMPT
    return msgspec.Raw(_encode((named, [r.key for r in group.samples], [r.key for r in group.partials])))


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))
