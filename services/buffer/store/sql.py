"""The ledger in a SQL database: one schema and one list of statements, for SQLite and PostgreSQL.

A row has a CRC-32 over its key and body; a payload has its digest, in the row of its sample. What does not agree is
reported, left where it is and not served. Payloads of a large call are a file of that call, where the database has a
folder beside it. Many rows go into one statement, so that the database works without the GIL.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.errors import DataLoss, RetryableError
from headrace.protobuf import Payload
from headrace.rpc.log import log
from services.buffer.ledger.group import Group, Prompt, SampleRecord
from services.buffer.ledger.state import LedgerEvent, Transaction
from services.buffer.store import rows
from services.buffer.store.base import CopiedFile, Damage, Snapshot, checked_payload, group_of, way_out
from services.buffer.store.payload_files import PayloadFiles, PayloadPlace

TABLES = {
    "streams": ("name", "name TEXT PRIMARY KEY, body {bytes} NOT NULL, crc {int} NOT NULL"),
    "prompts": ("group_id", "group_id TEXT PRIMARY KEY, body {bytes} NOT NULL, crc {int} NOT NULL"),
    "groups": ("group_id", "group_id TEXT PRIMARY KEY, body {bytes} NOT NULL, crc {int} NOT NULL"),
    "samples": ("key", "key TEXT PRIMARY KEY, body {bytes} NOT NULL, crc {int} NOT NULL"),
    "payload_files": ("key", "key TEXT PRIMARY KEY, body {bytes} NOT NULL, crc {int} NOT NULL"),
    "payloads": ("key", "key TEXT PRIMARY KEY, body {bytes} NOT NULL"),
    "events": ("position", "position {int} PRIMARY KEY, body {bytes} NOT NULL, crc {int} NOT NULL"),
}
"""Table → (its key, its columns)."""
LARGE_CALL_BYTES = 1 << 20
"""Payloads of a call of at least so many bytes are one file. In rows they would be written twice: to the log, and to
the table."""
_ROWS_PER_STATEMENT = 256

Statement = tuple[str, Sequence[Any]]
"""SQL with a ? for each value, and the values."""
Query = Callable[[str], Iterable[tuple[Any, ...]]]
_Answer = TypeVar("_Answer")


class Database(Protocol):
    """What differs between SQLite and PostgreSQL."""

    @property
    def name(self) -> str: ...

    @property
    def ledger_id(self) -> str: ...

    def transact(self, statements: Sequence[Statement]) -> None:
        """Makes all statements durable, or none. It waits while the database is away or its disk full."""

    def load(self, read: Callable[[Query], _Answer]) -> _Answer:
        """Calls `read` with the writer's connection, before the first transaction."""

    def query(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Reads beside the writer. Raises DataLoss where pages are damaged, Unavailable while the database is away."""

    def copy(
        self, writing: AbstractContextManager[Any], files: Callable[[], Sequence[str]]
    ) -> AbstractContextManager[Sequence[CopiedFile]]:
        """Yields the files of a consistent copy. Nothing is written while `writing` is held."""

    def damage(self) -> Sequence[Damage]:
        """Returns what was found damaged when it was opened."""

    def free_bytes(self) -> int | None: ...

    @property
    def waiting_for(self) -> RetryableError | None: ...

    def stop_waiting(self) -> None: ...

    def close(self) -> None: ...


class SqlStore:
    """Without `files` all payloads go into rows."""

    def __init__(
        self, database: Database, files: PayloadFiles | None, large_call_bytes: int = LARGE_CALL_BYTES
    ) -> None:
        self._database = database
        self._files = files
        self._large_call_bytes = large_call_bytes
        self._prepared: dict[int, dict[str, PayloadPlace]] = {}
        """Payloads of transactions, by identity, whose file is on the disk, while no row names it yet."""
        self._writing = threading.RLock()
        self._damage: dict[str, Damage] = {}
        """By table and key."""
        self._torn_bytes = self._open_files(files) if files else 0

    @property
    def name(self) -> str:
        return self._database.name

    def _open_files(self, files: PayloadFiles) -> int:
        """Loads what rows name; deletes what none does, where no such row was lost. Returns the deleted bytes."""
        damaged: list[str] = []
        found = self._database.load(lambda query: dict(whole_rows(query, "payload_files", damaged)))
        files.name({key: rows.load_place(body) for key, body in found.items()})
        for name in damaged:
            self._damage[name] = Damage(f"the row {name} is damaged", group_of(name.partition("/")[2]))
        was_lost = any("payload_files" in damage.what for damage in self.damage())
        return 0 if was_lost else files.sweep()

    def load(self) -> Snapshot:
        with self._writing:
            state = self._database.load(_load)
        self._damage.update({damage.what: damage for damage in state.damage})
        lacking = self._files.lacking() if self._files else {}
        there = state.payload_keys | (self._files.keys() if self._files else set())
        for record in (record for group in state.groups for record in group.records):
            if (what := lacking.get(record.key)) is not None or record.key not in there:
                self._note(record, what or f"no row has the payload of sample {record.sample_id}")
        return Snapshot(
            self._database.ledger_id,
            tuple(state.streams.values()),
            tuple(group for group in state.groups if group.stream in state.streams),
            max(state.position, max((group.position for group in state.groups), default=0)),
            state.oldest_position,
            tuple(sorted(state.lost_streams)),
            tuple(sorted(state.lost_groups)),
            self._torn_bytes,
        )

    # Writing

    def prepare(self, transactions: Sequence[Transaction]) -> None:
        if self._files is None:
            return
        large = [t for t in transactions if sum(map(len, t.payloads.values())) >= self._large_call_bytes]
        if large:
            placed = self._files.write([t.payloads for t in large])
            self._prepared.update(zip(map(id, large), placed, strict=True))

    def commit(self, transactions: Sequence[Transaction]) -> None:
        self.prepare([t for t in transactions if id(t) not in self._prepared])
        changes = rows.Changes()
        for transaction in transactions:
            changes.add(transaction, self._prepared.get(id(transaction)))
        with self._writing:
            self._database.transact(self._statements(changes))
            if self._files:
                for transaction in transactions:
                    self._files.name(self._prepared.pop(id(transaction), {}))
                self._files.drop(changes.deleted_payloads)
            if changes.events_from:
                self._delete_events(changes.events_from)

    def _statements(self, changes: rows.Changes) -> list[Statement]:
        in_files = [key for key in changes.deleted_payloads if self._files and self._files.find(key)]
        in_rows = changes.deleted_payloads if not in_files else sorted({*changes.deleted_payloads} - {*in_files})
        return [
            *_write("streams", {key: rows.encode(state) for key, state in changes.streams.items()}),
            *_write("prompts", {key: rows.encode(prompt) for key, prompt in changes.prompts.items()}),
            *_write("groups", {key: rows.dump_group(group) for key, group in changes.groups.items()}),
            *_delete("groups", changes.forgotten),
            *_delete("prompts", changes.forgotten),
            *_delete("payload_files", in_files),
            *_delete("payloads", in_rows),
            *_delete("samples", changes.deleted_samples),
            *_write("samples", {key: rows.encode(record) for key, record in changes.samples.items()}),
            *_upsert("payloads", list(changes.payloads.items())),
            *_write("payload_files", {key: rows.encode(place) for key, place in changes.places.items()}),
            *_write("events", {event.position: rows.encode(event) for event in changes.events}),
        ]

    def _delete_events(self, end: int) -> None:
        """Deletes the history's oldest events. If their pages are damaged they stay, without an error."""
        try:
            self._database.transact([("DELETE FROM events WHERE position < ?", (end,))])
        except DataLoss as error:
            log.error("history_kept", before_position=end, error=str(error))

    # Reading

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        places = {r.key: place for r in records if self._files and (place := self._files.find(r.key))}
        in_rows = self._read_rows([record for record in records if record.key not in places])
        return [self._checked(record, places.get(record.key), in_rows.get(record.key)) for record in records]

    def _read_rows(self, records: Sequence[SampleRecord]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for first in range(0, len(records), _ROWS_PER_STATEMENT):
            some = records[first : first + _ROWS_PER_STATEMENT]
            sql = f"SELECT key, body FROM payloads WHERE key IN ({_marks(len(some))})"  # noqa: S608  # marks only
            try:
                found.update(self._database.query(sql, [record.key for record in some]))
            except DataLoss as error:
                if len(records) == 1:
                    self._note(records[0], f"the payload of sample {records[0].sample_id} cannot be read")
                    raise DataLoss(f"{error.message}: {way_out(records[0])}") from error
                for record in some:
                    found.update(self._read_rows([record]))
        return found

    def _checked(self, record: SampleRecord, place: PayloadPlace | None, payload: Any) -> Payload:
        if place and self._files:
            payload = self._files.read(place)
            if payload is None and self._files.find(record.key):
                self._note(record, f"the payload of sample {record.sample_id} in payloads/{place.file} is damaged")
        try:
            if payload is not None and not isinstance(payload, bytes):
                raise DataLoss(f"the row of sample {record.sample_id}'s payload is damaged: {way_out(record)}")
            if payload is None and (noted := self._damage.get(record.key)):
                raise DataLoss(f"{noted.what}: {way_out(record)}")
            return checked_payload(record, payload)
        except DataLoss:
            where = f"in payloads/{place.file}" if place else f"in {self._database.name}"
            self._note(record, f"the payload of sample {record.sample_id} {where} is damaged")
            raise

    def _note(self, record: SampleRecord, what: str) -> None:
        if record.key not in self._damage:
            self._damage[record.key] = Damage(what, group_of(record.key), record.sample_id)
            log.error("payload_damaged", what=what, group_id=group_of(record.key), sample_id=record.sample_id)

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        found = self._database.query(
            "SELECT position, body, crc FROM events WHERE position >= ? ORDER BY position LIMIT ?",
            (from_position, count),
        )
        events: list[LedgerEvent] = []
        for expected, (position, body, crc) in enumerate(found, found[0][0] if found else 0):
            if position != expected or checksum(position, body) != crc:
                if events:
                    break
                raise DataLoss(
                    f"event {expected} of the history is damaged: watch from position {expected + 1}",
                    next_position=str(expected + 1),
                )
            events.append(rows.load_event(body))
        return events

    def copy(self) -> AbstractContextManager[Sequence[CopiedFile]]:
        return self._database.copy(self._writing, self._files.names if self._files else list)

    def damage(self) -> Sequence[Damage]:
        return [*self._database.damage(), *self._damage.copy().values()]

    def free_bytes(self) -> int | None:
        return self._database.free_bytes()

    @property
    def waiting_for(self) -> RetryableError | None:
        return self._database.waiting_for

    def stop_waiting(self) -> None:
        self._database.stop_waiting()

    def close(self) -> None:
        with self._writing:
            self._database.close()


# Statements


def schema(types: Mapping[str, str]) -> list[str]:
    """Returns the statements that create missing tables. `types` has the database's words for `int` and `bytes`."""
    return [f"CREATE TABLE IF NOT EXISTS {table} ({columns.format(**types)})" for table, (_, columns) in TABLES.items()]


def checksum(key: str | int, body: bytes) -> int:
    """Computes a row's checksum over its key and body."""
    return zlib.crc32(body, zlib.crc32(str(key).encode()))


def _write(table: str, bodies: Mapping[Any, bytes]) -> Iterator[Statement]:
    return _upsert(table, [(key, body, checksum(key, body)) for key, body in bodies.items()])


def _upsert(table: str, values: Sequence[tuple[Any, ...]]) -> Iterator[Statement]:
    """Replaces rows of the same keys. The numbers of rows are few: the database has prepared those statements."""
    key, _ = TABLES[table]
    first, count = 0, _ROWS_PER_STATEMENT
    while first < len(values):
        while count > len(values) - first:
            count //= 2
        some = values[first : first + count]
        width = len(some[0])
        columns = "body = excluded.body" + (", crc = excluded.crc" if width > 2 else "")
        marks = ", ".join([f"({_marks(width)})"] * count)
        yield (
            f"INSERT INTO {table} VALUES {marks} ON CONFLICT ({key}) DO UPDATE SET {columns}",  # noqa: S608  # names of our own schema, and marks
            list(chain.from_iterable(some)),
        )
        first += count


def _delete(table: str, keys: Sequence[str]) -> Iterator[Statement]:
    """Deletes those of the rows that exist."""
    for first in range(0, len(keys), _ROWS_PER_STATEMENT):
        some = keys[first : first + _ROWS_PER_STATEMENT]
        yield f"DELETE FROM {table} WHERE {TABLES[table][0]} IN ({_marks(len(some))})", some  # noqa: S608  # names of our own schema, and marks


def _marks(count: int) -> str:
    return ", ".join("?" * count)


# Loading


@dataclass(slots=True)
class _State:
    """The contents of the tables."""

    streams: dict[str, Any]
    groups: list[Group]
    position: int
    oldest_position: int
    payload_keys: set[str]
    damage: list[Damage] = field(default_factory=list)
    lost_streams: set[str] = field(default_factory=set)
    lost_groups: set[str] = field(default_factory=set)


def whole_rows(query: Query, table: str, damaged: list[str]) -> Iterator[tuple[Any, bytes]]:
    """Yields keys and bodies; the names of rows with a wrong checksum go to `damaged`."""
    key_name, _ = TABLES[table]
    for key, body, crc in query(f"SELECT {key_name}, body, crc FROM {table}"):  # noqa: S608  # names of our own schema
        if isinstance(body, bytes) and checksum(key, body) == crc:
            yield key, body
        else:
            damaged.append(f"{table}/{key}")


def _load(query: Query) -> _State:
    """Damaged rows are reported and left where they are."""
    damaged: list[str] = []
    streams = {name: rows.load_stream(body) for name, body in whole_rows(query, "streams", damaged)}
    prompts = {group_id: rows.load_prompt(body) for group_id, body in whole_rows(query, "prompts", damaged)}
    records = {key: rows.load_sample(body) for key, body in whole_rows(query, "samples", damaged)}
    lost_samples: dict[str, dict[int, str]] = {}
    groups = list(_whole_groups(whole_rows(query, "groups", damaged), prompts, records, damaged, lost_samples))
    there = {group.group_id for group in groups}
    # A group whose row has lost its key is known by its prompt and its samples.
    known = dict.fromkeys((*prompts, *map(group_of, records)))
    damaged += [name for group_id in known if group_id not in there and (name := f"groups/{group_id}") not in damaged]
    ((oldest,),) = query("SELECT COALESCE(MIN(position), 1) FROM events")
    ((position,),) = query("SELECT COALESCE(MAX(position), 0) FROM events")  # both at once read the whole table
    state = _State(streams, groups, position, oldest, {key for (key,) in query("SELECT key FROM payloads")})
    state.damage = [*map(_row_damage, damaged), *_lost_samples(query, lost_samples)]
    state.lost_streams = {name.removeprefix("streams/") for name in damaged if name.startswith("streams/")}
    state.lost_streams |= {group.stream for group in groups if group.stream not in streams}
    state.lost_groups = {damage.group_id for damage in state.damage if damage.group_id} - there
    return state


def _whole_groups(
    found: Iterable[tuple[str, bytes]],
    prompts: Mapping[str, Prompt],
    records: Mapping[str, SampleRecord],
    damaged: list[str],
    lost: dict[str, dict[int, str]],
) -> Iterator[Group]:
    for group_id, body in found:
        try:
            yield rows.load_group(body, prompts[group_id], records)
        except KeyError:  # its prompt or a sample is damaged
            damaged.append(f"groups/{group_id}")
            keys = rows.sample_keys(body)
            lost[group_id] = {number: key for number, key in enumerate(keys) if key not in records}


def _lost_samples(query: Query, lost: Mapping[str, Mapping[int, str]]) -> Iterator[Damage]:
    """Names samples whose rows are lost: their ids stand in the history, where their group was put."""
    if not any(lost.values()):
        return
    ids = dict[str, tuple[str, ...]]()
    try:
        for (body,) in query("SELECT body FROM events ORDER BY position"):
            event = rows.load_event(body)
            if event.group_id is not None and event.group_id in lost and event.sample_ids:
                ids[event.group_id] = event.sample_ids
    except (DataLoss, msgspec.MsgspecError):  # what of the history is damaged names nothing
        pass
    for group_id, keys in lost.items():
        for number, key in keys.items():
            sample_id = next(iter(ids.get(group_id, ())[number : number + 1]), None)
            yield Damage(f"the row of the sample with the key {key} is damaged or lost", group_id, sample_id)


def _row_damage(name: str) -> Damage:
    table, _, key = name.partition("/")
    return Damage(f"the row {name} is damaged", key if table in ("groups", "prompts") else None)
