"""Opens a ledger's folder: SQLite first, then the payload files that its rows name.

Bytes behind the last extent of a file, and files that no row names, were written by commits that never ended: they are
cut off and deleted. They stay where a damaged row may name them; and once a row with the location of payloads was lost,
no payload file of an earlier process is ever deleted.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from headrace.disk import lock
from headrace.errors import ConfigError
from services.buffer.store.base import Damage
from services.buffer.store.files import Files, sync_folder
from services.buffer.store.sqlite.database import FILE, checksum, note_version, open_database
from services.buffer.store.sqlite.extent import Extents
from services.buffer.store.sqlite.loading import load_extents
from services.buffer.store.sqlite.payload_files import PayloadFiles
from services.buffer.store.sqlite.position_mark import PositionMark
from services.buffer.store.sqlite.salvage import (
    check_pages,
    damaged_tables,
    delete_drafts,
    has_lost_places,
    old_damaged_tables,
    salvage,
    salvaged,
)

MARK = "position"


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an open ledger."""

    writer: sqlite3.Connection
    payload_files: PayloadFiles
    extents: Extents
    mark: PositionMark
    ledger_id: str
    torn_bytes: int
    damage: tuple[Damage, ...]
    kept: frozenset[bytes]
    """Payload files that a lost row may have named: they are neither emptied nor deleted."""

    def close(self) -> None:
        """Ends it: no other method may be called afterwards."""
        self.writer.close()
        self.payload_files.close()
        self.mark.close()


def lock_folder(folder: Path) -> TextIO:
    """Holds the lock until the file is closed. Raises ConfigError when another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock_file = (folder / "lock").open("w")
    if not lock(lock_file):
        raise ConfigError(f"{folder} is in use by another buffer: stop it, or choose another --data-dir")
    return lock_file


def open_ledger(folder: Path, files: Files, file_bytes: int, connect: Callable[[Path], sqlite3.Connection]) -> Opened:
    """Raises DataLoss when the ledger cannot go on without breaking a promise, ConfigError for another release's.

    SQLite's own errors for damage pass through.
    """
    payload_files = PayloadFiles(files, file_bytes)
    sync_folder(folder)  # the name of payloads/
    sync_folder(folder.parent)
    may_be_new = not payload_files.file_ids() and not (folder / MARK).exists()
    delete_drafts(folder)
    was_closed = not _num_bytes(folder / f"{FILE}-wal")
    writer = open_database(folder / FILE, connect, may_be_new=may_be_new)
    try:
        if not was_closed:
            check_pages(writer, folder)
        mark = PositionMark(folder / MARK)
        ledger_id = _require_marked(writer, mark)
        problems = damaged_tables(writer, folder) if was_closed else {}
        if problems or old_damaged_tables(writer):
            salvage(folder, writer, problems)
            writer = open_database(folder / FILE, connect, may_be_new=False)
        found, damage = load_extents(writer)
        kept = frozenset(payload_files.file_ids() if damage or has_lost_places(writer) else ())
        damage += salvaged(writer)
        extents = Extents(found)
        lost = _damaged_files(payload_files, extents)
        torn_bytes = 0 if damage else _cut(payload_files, extents, set(lost))
        note_version(writer)
    except BaseException:
        writer.close()
        raise
    return Opened(writer, payload_files, extents, mark, ledger_id, torn_bytes, (*damage, *lost.values()), kept)


def _num_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _require_marked(writer: sqlite3.Connection, mark: PositionMark) -> str:
    """Checks the position mark; returns the ledger's id."""
    (position,) = writer.execute("SELECT COALESCE(MAX(position), 0) FROM events").fetchone()
    row = writer.execute("SELECT body, crc FROM meta WHERE key = 'ledger_id'").fetchone()
    is_whole = row is not None and isinstance(row[0], bytes) and checksum("ledger_id", row[0]) == row[1]
    mark.require(bytes(row[0]).decode() if is_whole else None, position)
    if is_whole:
        return bytes(row[0]).decode()
    ledger_id = os.urandom(4).hex()  # leases that are out keep theirs: it tells new ones apart
    body = ledger_id.encode()
    writer.execute("REPLACE INTO meta VALUES ('ledger_id', ?, ?)", (body, checksum("ledger_id", body)))
    mark.write(ledger_id, position)
    return ledger_id


def _damaged_files(files: PayloadFiles, extents: Extents) -> dict[bytes, Damage]:
    ends = {file_id: max(extent.end for extent in extents.of_file(file_id)) for file_id in extents.file_ids}
    problems = {file_id: files.damage_of(file_id, end) for file_id, end in ends.items()}
    return {file_id: Damage(problem) for file_id, problem in problems.items() if problem}


def _cut(files: PayloadFiles, extents: Extents, damaged: set[bytes]) -> int:
    """Returns how many bytes were cut off; deleted files are not counted."""
    for file_id in files.file_ids() - extents.file_ids:
        files.delete(file_id)
    whole = extents.file_ids - damaged
    return sum(files.cut(file_id, max(e.end for e in extents.of_file(file_id))) for file_id in whole)
