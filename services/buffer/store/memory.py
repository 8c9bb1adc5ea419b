"""The ledger's rows in dictionaries, for tests and for runs that may lose everything with the process."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager

from headrace.errors import FailedPrecondition, RetryableError
from headrace.protobuf import Payload
from services.buffer.ledger.group import Group, SampleRecord
from services.buffer.ledger.state import LedgerEvent, Transaction
from services.buffer.ledger.stream import StreamState
from services.buffer.store.base import CopiedFile, Damage, Snapshot, checked_payload


class MemoryStore:
    """It is durable for as long as the object lives."""

    name = "memory"

    def __init__(self) -> None:
        self._ledger_id = secrets.token_hex(4)
        self._streams: dict[str, StreamState] = {}
        self._groups: dict[str, Group] = {}
        self._payloads: dict[str, bytes] = {}
        self._events: list[LedgerEvent] = []
        self._oldest_position = 1

    def load(self) -> Snapshot:
        position = self._oldest_position + len(self._events) - 1
        streams, groups = tuple(self._streams.values()), tuple(self._groups.values())
        return Snapshot(self._ledger_id, streams, groups, position, self._oldest_position)

    def prepare(self, transactions: Sequence[Transaction]) -> None:
        pass

    def commit(self, transactions: Sequence[Transaction]) -> None:
        for transaction in transactions:
            self._streams.update(transaction.streams)
            self._groups.update(transaction.groups)
            for group in transaction.forgotten:
                del self._groups[group.group_id]
            for key in transaction.deleted_payloads:
                self._payloads.pop(key, None)
            self._payloads.update((key, bytes(payload)) for key, payload in transaction.payloads.items())
            self._events.extend(transaction.events)
            if transaction.events_from:
                del self._events[: transaction.events_from - self._oldest_position]
                self._oldest_position = transaction.events_from

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        return [checked_payload(record, self._payloads.get(record.key)) for record in records]

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        first = max(from_position - self._oldest_position, 0)
        return self._events[first : first + count]

    def copy(self) -> AbstractContextManager[Sequence[CopiedFile]]:
        raise FailedPrecondition(
            "a ledger in memory has no files to copy: start the buffer with another --buffer-store"
        )

    def damage(self) -> Sequence[Damage]:
        return ()

    def free_bytes(self) -> int | None:
        return None

    @property
    def waiting_for(self) -> RetryableError | None:
        return None

    def stop_waiting(self) -> None:
        pass

    def close(self) -> None:
        pass
