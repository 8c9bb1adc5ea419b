"""The ledger in a folder: `ledger.sqlite` is the only truth, payloads lie in append-only files beside it.

commit: payloads appended and synced → one transaction that names their places (durable here) → places in memory.
open: the tables, then the files that rows name; whatever else is in the payload files is not there, and is cut off.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TextIO

from headrace.errors import ConfigError, DataLoss
from services.buffer.group import SampleRecord
from services.buffer.store import rows as codec
from services.buffer.store.base import Damage, Snapshot
from services.buffer.store.copy import CopiedFile, copy_folder, delete_leftovers, files_of
from services.buffer.store.files import DiskFiles, Files, sync_folder
from services.buffer.store.payload import checked_payload
from services.buffer.store.sqlite.database import FILE, checksum, connect, open_database
from services.buffer.store.sqlite.disk_errors import disk_errors
from services.buffer.store.sqlite.extent import Extent, Extents
from services.buffer.store.sqlite.loading import check_tables, load_extents, load_state
from services.buffer.store.sqlite.payload_files import NewExtent, PayloadFiles, file_name
from services.buffer.store.sqlite.writing import delete_extents, transaction, write_extents, write_state
from services.buffer.transaction import LedgerEvent, Payload, Transaction

FILE_BYTES = 64 << 20
_PAYLOADS = "payloads"


class SqliteStore:
    """`folder`/ledger.sqlite and `folder`/payloads/. Raises ConfigError when another process has it."""

    name = "sqlite"

    def __init__(
        self,
        folder: Path,
        *,
        file_bytes: int = FILE_BYTES,
        open_files: Callable[[Path], Files] = DiskFiles,
        connect_writer: Callable[[Path], sqlite3.Connection] = connect,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = _locked(folder)
        delete_leftovers(folder)
        self._folder = folder
        with disk_errors(folder):
            self._open(file_bytes, open_files, connect_writer)

    def _open(
        self,
        file_bytes: int,
        open_files: Callable[[Path], Files],
        connect_writer: Callable[[Path], sqlite3.Connection],
    ) -> None:
        folder = self._folder
        self._files = open_files(folder / _PAYLOADS)
        self._payload_files = PayloadFiles(self._files, file_bytes)
        if self._payload_files.file_ids() and not (folder / FILE).exists():
            raise DataLoss(f"{folder} has payloads and no {FILE}, which says what they are: restore a backup")
        sync_folder(folder)
        sync_folder(folder.parent)
        self._writer = open_database(folder / FILE, connect_writer)
        check_tables(self._writer)
        self._reader = connect(folder / FILE)
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._ledger_id = self._open_ledger()
        extents, damaged = load_extents(self._writer)
        self._extents = Extents(extents)
        self._damaged = damaged
        self._torn_bytes = self._recover_files()

    def load(self) -> Snapshot:
        with self._writing:
            state = load_state(self._writer)
        return Snapshot(
            self._ledger_id,
            state.streams,
            state.groups,
            state.position,
            state.oldest_position,
            (*state.damaged, *self._damaged),
            self._torn_bytes,
        )

    def commit(self, transactions: Sequence[Transaction]) -> None:
        with self._writing, disk_errors(self._folder):
            rows = [codec.to_rows(t) for t in transactions]
            new = [_new_extents(t, r) for t, r in zip(transactions, rows, strict=True)]
            flat = [extent for extents in new for extent in extents]
            placed = iter(self._payload_files.append(flat) if flat else ())
            added: dict[tuple[bytes, int], Extent] = {}
            dead: list[Extent] = []
            for t, extents in zip(transactions, new, strict=True):
                for key in t.deleted_payloads:
                    extent = self._extents.drop(key)
                    if extent and not added.pop(extent.place, None):
                        dead.append(extent)
                for extent in (next(placed) for _ in extents):
                    added[extent.place] = extent
                    self._extents.add(extent)
            with transaction(self._writer):
                write_state(self._writer, rows)
                delete_extents(self._writer, dead)
                write_extents(self._writer, list(added.values()))

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        return [self._read_payload(record) for record in records]

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        with self._reading:
            rows = self._reader.execute(
                "SELECT position, body, crc FROM events WHERE position >= ? ORDER BY position LIMIT ?",
                (from_position, count),
            ).fetchall()
        for position, body, crc in rows:
            if checksum(str(position), body) != crc:
                raise DataLoss(f"event {position} of the history is damaged: watch from position {position + 1}")
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

    def free_bytes(self) -> int | None:
        return self._files.free_bytes()

    def close(self) -> None:
        with self._writing:
            self._reader.close()
            self._writer.close()
            self._payload_files.close()
            self._lock_file.close()

    # Inside

    def _open_ledger(self) -> str:
        body = os.urandom(4).hex().encode()
        self._writer.execute(
            "INSERT OR IGNORE INTO meta VALUES ('ledger_id', ?, ?)", (body, checksum("ledger_id", body))
        )
        found, _ = self._writer.execute("SELECT body, crc FROM meta WHERE key = 'ledger_id'").fetchone()
        return bytes(found).decode()

    def _recover_files(self) -> int:
        """Deletes and cuts what no row names; returns how many bytes were cut off."""
        named = self._extents.file_ids
        torn_bytes = 0
        for file_id in named:
            end = max(extent.end for extent in self._extents.of_file(file_id))
            problem = self._payload_files.damage_of(file_id, end)
            if problem:
                self._damaged.append(Damage(problem))
            else:
                torn_bytes += self._payload_files.cut(file_id, end)
        self._payload_files.delete(self._payload_files.file_ids() - named)
        return torn_bytes

    def _read_payload(self, record: SampleRecord) -> Payload:
        found = self._extents.find(record.key)
        while found is not None:
            payload = self._try_read(*found)
            if payload is not None:
                return checked_payload(record, payload)
            moved = self._extents.find(record.key)
            if moved == found:
                raise DataLoss(
                    f"the payload of sample {record.sample_id} in {_PAYLOADS}/{file_name(found[0].file_id)} is "
                    "damaged: drop its group or rewind past it"
                )
            found = moved
        return checked_payload(record, None)

    def _try_read(self, extent: Extent, number: int) -> Payload | None:
        try:
            return self._payload_files.read(extent, number)
        except FileNotFoundError:
            return None

    def _pin(self, source: sqlite3.Connection, folder: Path) -> tuple[str | None, int]:
        """One moment: what `source` reads from now on, and links to all payload files; (the active one, its end)."""
        target = folder / _PAYLOADS
        target.mkdir()
        with self._writing:
            source.execute("BEGIN")
            source.execute("SELECT COUNT(*) FROM meta").fetchone()
            for path in (self._folder / _PAYLOADS).iterdir():
                (target / path.name).hardlink_to(path)
            active = self._payload_files.active
            return file_name(active) if active else None, self._payload_files.end


def _locked(folder: Path) -> TextIO:
    lock_file = (folder / "lock").open("w")
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{folder} is in use by another buffer: stop it, or choose another --data-dir") from error
    return lock_file


def _new_extents(transaction: Transaction, rows: codec.Rows) -> list[NewExtent]:
    """What one command brought of a group is one."""
    return [
        [(row.key, transaction.payloads[row.key]) for row in brought]
        for _, brought in groupby(rows.samples, lambda row: row.position)
    ]
