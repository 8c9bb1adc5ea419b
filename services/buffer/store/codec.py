"""Ledger rows as JSON and back. Bytes are base64, enums their names, absent values are left out by nobody."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

from msgspec import to_builtins

from headrace.trajectory import Failure
from services.buffer.group import EndedLease, Group, GroupState, Lease, Prompt, SampleRecord
from services.buffer.limiter import Limiter
from services.buffer.source import Cursor, FileSource
from services.buffer.stream import ExpiryAction, Selection, StreamConfig, StreamState
from services.buffer.transaction import LedgerEvent


def dump_group(group: Group) -> str:
    """All of a group but its prompt, which never changes and has a row of its own."""
    return _dump(
        {
            "stream": group.stream,
            "seq": group.seq,
            "state": group.state.value,
            "attempts": group.attempts,
            "num_leases": group.num_leases,
            "lease": to_builtins(group.lease) if group.lease else None,
            "admitted_at": group.admitted_at,
            "samples": [_dump_record(r) for r in group.samples],
            "partials": [_dump_record(r) for r in group.partials],
            "oldest_version": group.oldest_version,
            "step": group.step,
            "batch_index": group.batch_index,
            "failure": [group.failure.reason, group.failure.message] if group.failure else None,
            "ended_step": group.ended_step,
            "ended": [[e.lease_id, _base64(e.fingerprint)] for e in group.ended],
            "position": group.position,
            "source": group.source,
        }
    )


def load_group(group_id: str, prompt: Prompt, text: str) -> Group:
    """The inverse of `dump_group`."""
    row = json.loads(text)
    row["state"] = GroupState(row["state"])
    row["lease"] = Lease(**row["lease"]) if row["lease"] else None
    row["samples"] = tuple(_load_record(r) for r in row["samples"])
    row["partials"] = tuple(_load_record(r) for r in row["partials"])
    row["failure"] = Failure(*row["failure"]) if row["failure"] else None
    row["ended"] = tuple(EndedLease(lease_id, b64decode(f)) for lease_id, f in row["ended"])
    return Group(group_id=group_id, prompt=prompt, **row)


def dump_stream(state: StreamState) -> str:
    """A stream's config and state."""
    return _dump(to_builtins(state))


def load_stream(text: str) -> StreamState:
    """The inverse of `dump_stream`."""
    row = json.loads(text)
    config = row["config"]
    config["files"] = tuple(FileSource(**file) for file in config["files"])
    config["limiter"] = Limiter(**config["limiter"]) if config["limiter"] else None
    config["expiry_action"] = ExpiryAction(config["expiry_action"])
    config["selection"] = Selection(config["selection"])
    row["config"] = StreamConfig(**config)
    row["cursors"] = tuple(Cursor(**cursor) for cursor in row["cursors"])
    row["file_digests"] = tuple(row["file_digests"])
    for name in ("ended", "taken"):
        row[name] = tuple(row.get(name, ()))
    row["rewinds"] = {request_id: tuple(answer) for request_id, answer in row["rewinds"].items()}
    return StreamState(**row)


def dump_event(event: LedgerEvent) -> str:
    """One line of the history."""
    return _dump(to_builtins(event))


def load_event(text: str) -> LedgerEvent:
    """The inverse of `dump_event`."""
    row = json.loads(text)
    row["state"] = GroupState(row["state"]) if row["state"] else None
    row["sample_ids"] = tuple(row["sample_ids"])
    return LedgerEvent(**row)


def _dump_record(record: SampleRecord) -> list[Any]:
    return [
        record.key,
        record.sample_id,
        record.index,
        _base64(record.digest),
        record.payload_bytes,
        record.oldest_version,
        _base64(record.envelope),
        record.reward,
    ]


def _load_record(row: list[Any]) -> SampleRecord:
    key, sample_id, index, digest, payload_bytes, oldest_version, envelope, reward = row
    return SampleRecord(
        key, sample_id, index, b64decode(digest), payload_bytes, oldest_version, b64decode(envelope), reward
    )


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def _dump(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False)
