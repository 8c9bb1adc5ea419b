"""Transactions as rows in MessagePack.

A group's row is written at each of its transitions, so it holds neither its prompt nor its samples' envelopes, only the
keys of the samples: those have rows of their own, written once, when their payload arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.protobuf import Payload
from services.buffer.ledger.group import Group, Prompt, SampleRecord
from services.buffer.ledger.state import LedgerEvent, Transaction
from services.buffer.ledger.stream import StreamState
from services.buffer.store.payload_files import PayloadPlace

_NAMES = tuple(name for name in Group.__struct_fields__ if name not in ("prompt", "samples", "partials"))
_values = attrgetter(*_NAMES)
_NO_PROMPT = Prompt("", b"")


class _GroupBody(msgspec.Struct, array_like=True, frozen=True):
    group: Group
    samples: list[str]
    partials: list[str]


encode = msgspec.msgpack.Encoder().encode
load_stream = msgspec.msgpack.Decoder(StreamState).decode
load_prompt = msgspec.msgpack.Decoder(Prompt).decode
load_sample = msgspec.msgpack.Decoder(SampleRecord).decode
load_place = msgspec.msgpack.Decoder(PayloadPlace).decode
load_event = msgspec.msgpack.Decoder(LedgerEvent).decode
_load_group = msgspec.msgpack.Decoder(_GroupBody).decode


@dataclass(slots=True)
class Changes:
    """What several transactions write and delete together: of each row the last version."""

    streams: dict[str, StreamState] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    samples: dict[str, SampleRecord] = field(default_factory=dict)
    payloads: dict[str, Payload] = field(default_factory=dict)
    """Payloads for rows."""
    places: dict[str, PayloadPlace] = field(default_factory=dict)
    """Payloads that are in a file."""
    events: list[LedgerEvent] = field(default_factory=list)
    deleted_samples: list[str] = field(default_factory=list)
    deleted_payloads: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    """Groups that are deleted with their prompts."""
    events_from: int = 0
    """Events below this position are deleted."""

    def add(self, transaction: Transaction, places: Mapping[str, PayloadPlace] | None) -> None:
        """Adds a transaction. `places` is None where its payloads go into rows."""
        for key in transaction.deleted_payloads:
            self.payloads.pop(key, None)
            self.places.pop(key, None)
        self.deleted_payloads += transaction.deleted_payloads
        for key in _deleted_samples(transaction):
            self.samples.pop(key, None)
            self.deleted_samples.append(key)
        self.streams.update(transaction.streams)
        self.groups.update(transaction.groups)
        for group_id in transaction.new_groups:
            self.prompts[group_id] = transaction.groups[group_id].prompt
        if transaction.payloads:
            self.samples.update(_new_samples(transaction))
            if places is None:
                self.payloads.update(transaction.payloads)
            else:
                self.places.update(places)
        self.events += transaction.events
        self.forgotten += [group.group_id for group in transaction.forgotten]
        self.events_from = max(self.events_from, transaction.events_from or 0)


def _new_samples(transaction: Transaction) -> Iterable[tuple[str, SampleRecord]]:
    for group in transaction.groups.values():
        for record in (*group.samples, *group.partials):
            if record.key in transaction.payloads:
                yield record.key, record


def _deleted_samples(transaction: Transaction) -> list[str]:
    """Returns the keys to delete; a group that ended may still name samples whose payloads are deleted."""
    if not (transaction.deleted_payloads or transaction.forgotten):
        return []
    named = {record.key for group in transaction.groups.values() for record in (*group.samples, *group.partials)}
    forgotten = [record.key for group in transaction.forgotten for record in group.samples]
    return [*(key for key in transaction.deleted_payloads if key not in named), *forgotten]


def dump_group(group: Group) -> bytes:
    """Packs the group with the keys of its samples, without its prompt."""
    named: dict[str, Any] = dict(zip(_NAMES, _values(group), strict=True))
    named["prompt"] = _NO_PROMPT
    return encode((named, [r.key for r in group.samples], [r.key for r in group.partials]))


def load_group(body: bytes, prompt: Prompt, records: Mapping[str, SampleRecord]) -> Group:
    """Raises KeyError naming the sample that `records` lacks."""
    row = _load_group(body)
    samples, partials = (tuple(records[key] for key in keys) for keys in (row.samples, row.partials))
    return replace(row.group, prompt=prompt, samples=samples, partials=partials)


def sample_keys(body: bytes) -> list[str]:
    """Returns the keys of the samples that a group's row names, in the order in which they were put."""
    return _load_group(body).samples
