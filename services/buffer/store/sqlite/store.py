"""The ledger in a folder: `ledger.sqlite` is the only truth, payloads lie in append-only files beside it.

prepare: payloads appended and synced, beside the commit before.
commit: one transaction that names their places (durable here) → places in memory.
A full disk: both wait until there is space, and callers are told (`waiting_for`).
open: the tables, then the files that rows name; whatever else is in the payload files does not count, and is cut off.
Files that are mostly dead are emptied and deleted by `compaction`; what was written earlier is read once by `scrub`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import DataLoss, RetryableError
from headrace.protobuf import Payload
from headrace.rpc.log import log
from services.buffer.ledger.group import SampleRecord
from services.buffer.ledger.transaction import LedgerEvent, Transaction
from services.buffer.store import rows as codec
from services.buffer.store.base import Damage, Snapshot
from services.buffer.store.copy import CopiedFile, copy_folder, delete_leftovers, files_of
from services.buffer.store.files import DiskFiles, Files
from services.buffer.store.payload import checked_payload
from services.buffer.store.sqlite.compaction import Compactor
from services.buffer.store.sqlite.database import FILE, checksum, connect
from services.buffer.store.sqlite.disk_errors import disk_errors
from services.buffer.store.sqlite.extent import Extent
from services.buffer.store.sqlite.full_disk import FullDisk
from services.buffer.store.sqlite.loading import load_state, payload_damage
from services.buffer.store.sqlite.opening import Opened, lock_folder, open_ledger
from services.buffer.store.sqlite.payload_files import NewExtent, file_name
from services.buffer.store.sqlite.refusal import refusal, refusals
from services.buffer.store.sqlite.scrub import Scrub
from services.buffer.store.sqlite.writing import (
    delete_events,
    delete_extents,
    has_extents,
    transaction,
    write_extents,
    write_state,
)

FILE_BYTES = 64 << 20
PAYLOADS = "payloads"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A transaction whose payloads are on the disk, while no row names them yet."""

    transaction: Transaction
    rows: codec.TransactionRows
    extents: list[Extent]


class SqliteStore:
    """`folder`/ledger.sqlite and `folder`/payloads/. Raises ConfigError when another process has the folder."""

    name = "sqlite"

    def __init__(
        self,
        folder: Path,
        *,
        file_bytes: int = FILE_BYTES,
        open_files: Callable[[Path], Files] = DiskFiles,
        connect_writer: Callable[[Path], sqlite3.Connection] = connect,
    ) -> None:
        self._lock_file = lock_folder(folder)
        self._folder = folder
        try:
            with disk_errors(folder), refusals(folder):
                delete_leftovers(folder)
                self._files = open_files(folder / PAYLOADS)
                self._opened: Opened = open_ledger(folder, self._files, file_bytes, connect_writer)
                self._reader = connect(folder / FILE)
        except BaseException:
            self._lock_file.close()
            raise
        self._writer, self._extents = self._opened.writer, self._opened.extents
        self._payload_files, self._mark = self._opened.payload_files, self._opened.mark
        self._full_disk = FullDisk(folder)
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._prepared: dict[int, _Prepared] = {}
        """Prepared transactions by identity."""
        self._state_damage: tuple[Damage, ...] = ()
        self._payload_damage: dict[str, Damage] = {}
        """Damaged payloads by key."""
        self._compactor = Compactor(self, self._extents, self._payload_files, file_bytes, self._opened.kept)
        self._scrub = Scrub(self._extents.all(), self._check_extent)

    def load(self) -> Snapshot:
        with self._writing, disk_errors(self._folder), refusals(self._folder):
            state = load_state(self._writer)
        self._state_damage = state.damage
        for record in (r for group in state.groups for r in group.records if not self._extents.find(r.key)):
            group_id = record.key.rpartition("#")[0]
            what = f"no row has the location of the payload of sample {record.sample_id}"
            self._payload_damage[record.key] = Damage(what, group_id, record.sample_id)
        return Snapshot(
            self._opened.ledger_id,
            state.streams,
            state.groups,
            state.position,
            state.oldest_position,
            state.lost_streams,
            state.lost_groups,
            self._opened.torn_bytes,
        )

    def prepare(self, transactions: Sequence[Transaction]) -> None:
        rows = [codec.to_rows(t) for t in transactions]
        new = [_new_extents(t, r) for t, r in zip(transactions, rows, strict=True)]
        flat = [extent for extents in new for extent in extents]
        placed = iter(self._full_disk.outlast(lambda: self._payload_files.append(flat)) if flat else ())
        for one, its_rows, extents in zip(transactions, rows, new, strict=True):
            self._prepared[id(one)] = _Prepared(one, its_rows, [next(placed) for _ in extents])

    def commit(self, transactions: Sequence[Transaction]) -> None:
        self._compactor.check()
        self.prepare([t for t in transactions if id(t) not in self._prepared])
        prepared = [self._prepared.pop(id(t)) for t in transactions]
        rows = [one.rows for one in prepared]
        positions = [t.events[-1].position for t in transactions if t.events]
        with self._writing:
            added, dead = self._place(prepared)
            self._full_disk.outlast(lambda: self._write(rows, added, dead))
            self._payload_files.note_named([extent for one in prepared for extent in one.extents])
            self._full_disk.outlast(lambda: delete_events(self._writer, rows))
            if positions:
                self._full_disk.outlast(lambda: self._mark.write(self._opened.ledger_id, positions[-1]))
        if dead:
            self._compactor.wake()

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        return [self._read_payload(record) for record in records]

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        try:
            with self._reading:
                rows = self._reader.execute(
                    "SELECT position, body, crc FROM events WHERE position >= ? ORDER BY position LIMIT ?",
                    (from_position, count),
                ).fetchall()
        except sqlite3.DatabaseError as error:
            raise DataLoss(f"the history from position {from_position} cannot be read: {error}") from error
        for expected, (position, body, crc) in enumerate(rows, rows[0][0] if rows else 0):
            if position != expected or checksum(str(position), body) != crc:
                raise DataLoss(f"event {expected} of the history is damaged: watch from position {expected + 1}")
        return [codec.load_event(body) for _, body, _ in rows]

    @contextmanager
    def copy(self) -> Iterator[Sequence[CopiedFile]]:
        with copy_folder(self._folder) as folder:
            source, target = connect(self._folder / FILE), sqlite3.connect(folder / FILE)
            try:
                active, end = self._pin(source, folder)
                source.backup(target)  # of the moment that is pinned: the writer goes on
            finally:
                source.close()
                target.close()
            files = files_of(folder)
            yield [replace(file, num_bytes=end) if file.path.name == active else file for file in files]

    def damage(self) -> Sequence[Damage]:
        return [*self._opened.damage, *self._state_damage, *self._payload_damage.copy().values()]

    def free_bytes(self) -> int | None:
        return self._files.free_bytes()

    @property
    def waiting_for(self) -> RetryableError | None:
        return self._full_disk.refusal

    def stop_waiting(self) -> None:
        self._full_disk.stop()

    def close(self) -> None:
        self._scrub.close()
        self._compactor.close()
        with self._writing:
            self._reader.close()
            self._opened.close()
            self._lock_file.close()

    # For the compactor

    def move(self, extents: Sequence[Extent]) -> int:
        """Copies the extents that are still live; returns the payload bytes that are durable at their new location."""
        with self._writing, disk_errors(self._folder):
            moved = self._payload_files.copy([extent for extent in extents if self._extents.is_live(extent)])
            try:
                with transaction(self._writer):
                    self._change_places(moved)
                for old, new in moved:
                    self._extents.move(old, new)
            finally:
                self._payload_files.note_named([new for _, new in moved])
        return sum(new.num_bytes for _, new in moved)

    def extents_of(self, file_id: bytes) -> list[Extent]:
        """Returns the file's extents that rows name now."""
        return self._extents.of_file(file_id)

    def delete_unnamed(self, file_id: bytes) -> bool:
        """Deletes the file unless a row names it; returns True if it did."""
        with self._writing, disk_errors(self._folder):
            if self._payload_files.is_open(file_id) or has_extents(self._writer, file_id):
                return False
            self._payload_files.delete(file_id)
            return True

    def compact(self) -> int:
        """Compacts at once instead of in the background; returns the number of payload files deleted."""
        return self._compactor.compact()

    def scrub(self) -> None:
        """Returns when every payload that existed at the start has been read."""
        self._scrub.wait()

    # Inside

    def _write(self, rows: Sequence[codec.TransactionRows], added: Sequence[Extent], dead: Sequence[Extent]) -> None:
        with transaction(self._writer):
            write_state(self._writer, rows)
            delete_extents(self._writer, dead)
            write_extents(self._writer, added)

    def _change_places(self, moved: Sequence[tuple[Extent, Extent]]) -> None:
        found = delete_extents(self._writer, [old for old, _ in moved])
        if found != len(moved):
            problem = f"{found} of {len(moved)} locations that rows of {self._folder / FILE} should name exist"
            raise refusal(self._folder, problem)
        write_extents(self._writer, [new for _, new in moved])

    def _place(self, prepared: Sequence[_Prepared]) -> tuple[list[Extent], list[Extent]]:
        """Returns (new extents that are still live, earlier extents that are dead now)."""
        added: dict[tuple[bytes, int], Extent] = {}
        dead: list[Extent] = []
        for one in prepared:
            for key in one.transaction.deleted_payloads:
                extent = self._extents.drop(key)
                if extent and not added.pop(extent.place, None):
                    dead.append(extent)
            for extent in one.extents:
                added[extent.place] = extent
                self._extents.add(extent)
        return list(added.values()), dead

    def _read_payload(self, record: SampleRecord) -> Payload:
        found = self._extents.find(record.key)
        while found is not None:
            if (payload := self._payload_files.try_read(*found)) is not None:
                return checked_payload(record, payload)
            moved = self._extents.find(record.key)
            if moved == found:
                self._note_damage(*found)
                raise DataLoss(
                    f"the payload of sample {record.sample_id} in {PAYLOADS}/{file_name(found[0].file_id)} is "
                    f"damaged: {_way_out(record)}"
                )
            found = moved
        if record.key in self._payload_damage:
            raise DataLoss(f"{self._payload_damage[record.key].what}: {_way_out(record)}")
        return checked_payload(record, None)

    def _check_extent(self, extent: Extent) -> None:
        for number in range(len(extent.payloads)):
            if self._payload_files.try_read(extent, number) is None and self._extents.is_live(extent):
                self._note_damage(extent, number)

    def _note_damage(self, extent: Extent, number: int) -> None:
        key = extent.payloads[number].key
        if key not in self._payload_damage:
            what = f"a payload in {PAYLOADS}/{file_name(extent.file_id)} at {extent.offsets()[number]} is damaged"
            with self._reading:
                damage = payload_damage(self._reader, extent, key, what)
            self._payload_damage[key] = damage
            log.error("payload_damaged", what=what, group_id=damage.group_id, sample_id=damage.sample_id)

    def _pin(self, source: sqlite3.Connection, folder: Path) -> tuple[str | None, int]:
        """Starts a read transaction and links all payload files at one moment; returns (the active file, its end)."""
        target = folder / PAYLOADS
        target.mkdir()
        with self._writing, self._payload_files.still() as (active, end):
            source.execute("BEGIN")
            source.execute("SELECT COUNT(*) FROM meta").fetchone()
            for path in (self._folder / PAYLOADS).iterdir():
                (target / path.name).hardlink_to(path)
            return file_name(active) if active else None, end


def _way_out(record: SampleRecord) -> str:
    """Names the group, with whose id a payload's key begins."""
    return f"headrace buffer drop --group {record.key.rpartition('#')[0]} --reason damaged takes its group out"


def _new_extents(transaction: Transaction, rows: codec.TransactionRows) -> list[NewExtent]:
    """Makes one extent of the payloads that one command stores for a group."""
    payloads = transaction.payloads
    return [[(record.key, payloads[record.key]) for record in records] for records in rows.samples]
