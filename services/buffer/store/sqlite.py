"""The ledger's rows in one SQLite file: WAL, synchronous=FULL, one SQLite transaction for what is committed together.

SQLite's own checksums cut a torn tail of the log; every row of ours carries a CRC-32 that is checked when it is loaded,
and a payload is checked against the SHA-256 it was put with whenever it is read. One process at a time: a lock file.
"""

from __future__ import annotations

import fcntl
import secrets
import shutil
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import ConfigError, DataLoss
from services.buffer.group import Group, Prompt, SampleRecord
from services.buffer.store import codec
from services.buffer.store.base import Snapshot
from services.buffer.store.copy import CopiedFile, copy_folder, delete_leftovers, files_of
from services.buffer.store.payload import checked_payload
from services.buffer.stream import StreamState
from services.buffer.transaction import LedgerEvent, Payload, Transaction

_FILE = "ledger.sqlite"
_SCHEMA_VERSION = "2"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS streams (name TEXT PRIMARY KEY, body TEXT NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS prompts (
    group_id TEXT PRIMARY KEY, prompt_id TEXT NOT NULL, priority INTEGER NOT NULL,
    body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS groups (group_id TEXT PRIMARY KEY, body TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS payloads (key TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (position INTEGER PRIMARY KEY, body TEXT NOT NULL, crc INTEGER NOT NULL);
"""


class SqliteStore:
    """`folder`/ledger.sqlite. Raises ConfigError when another process has it."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is in use by another buffer: stop it, or choose another --data-dir") from error
        self._folder = folder
        delete_leftovers(folder)
        self._writer = _connect(folder / _FILE)
        self._writer.executescript(_SCHEMA)
        self._reader = _connect(folder / _FILE)
        self._reading = threading.Lock()
        self._ledger_id = self._open_meta(folder)

    def _open_meta(self, folder: Path) -> str:
        self._writer.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (_SCHEMA_VERSION,))
        self._writer.execute("INSERT OR IGNORE INTO meta VALUES ('ledger_id', ?)", (secrets.token_hex(4),))
        meta: dict[str, str] = dict(self._writer.execute("SELECT key, value FROM meta"))
        if meta["schema"] != _SCHEMA_VERSION:
            raise ConfigError(
                f"{folder} has ledger schema {meta['schema']}, this headrace reads {_SCHEMA_VERSION}: "
                "use the headrace that wrote it, or another --data-dir"
            )
        return meta["ledger_id"]

    def load(self) -> Snapshot:
        damaged: list[str] = []
        streams = [
            codec.load_stream(body)
            for name, body, crc in self._writer.execute("SELECT name, body, crc FROM streams")
            if _is_whole(damaged, f"streams/{name}", body.encode(), crc)
        ]
        if damaged:
            raise DataLoss(f"the records {damaged} are damaged, nothing can go on without: restore the data directory")
        (oldest,) = self._writer.execute("SELECT COALESCE(MIN(position), 1) FROM events").fetchone()
        (position,) = self._writer.execute("SELECT COALESCE(MAX(position), 0) FROM events").fetchone()
        groups = self._load_groups(damaged)
        return Snapshot(self._ledger_id, tuple(streams), tuple(groups), position, oldest, tuple(damaged))

    def _load_groups(self, damaged: list[str]) -> list[Group]:
        rows = self._writer.execute(
            "SELECT group_id, prompt_id, priority, prompts.body, prompts.crc, groups.body, groups.crc "
            "FROM groups JOIN prompts USING (group_id)"
        )
        return [
            codec.load_group(group_id, Prompt(prompt_id, prompt, priority), body)
            for group_id, prompt_id, priority, prompt, prompt_crc, body, crc in rows
            if _is_whole(damaged, f"prompts/{group_id}", prompt, prompt_crc)
            and _is_whole(damaged, f"groups/{group_id}", body.encode(), crc)
        ]

    def commit(self, transactions: Sequence[Transaction]) -> None:
        self._writer.execute("BEGIN IMMEDIATE")
        for transaction in transactions:
            self._write(transaction)
        self._writer.execute("COMMIT")

    def _write(self, transaction: Transaction) -> None:
        write = self._writer.executemany
        write("REPLACE INTO streams VALUES (?, ?, ?)", map(_stream_row, transaction.streams.values()))
        new = [transaction.groups[group_id] for group_id in transaction.new_groups]
        write("INSERT INTO prompts VALUES (?, ?, ?, ?, ?)", map(_prompt_row, new))
        write("REPLACE INTO groups VALUES (?, ?, ?)", map(_group_row, transaction.groups.values()))
        write("DELETE FROM groups WHERE group_id = ?", ((group.group_id,) for group in transaction.forgotten))
        write("DELETE FROM prompts WHERE group_id = ?", ((group.group_id,) for group in transaction.forgotten))
        write("DELETE FROM payloads WHERE key = ?", ((key,) for key in transaction.deleted_payloads))
        write("REPLACE INTO payloads VALUES (?, ?)", transaction.payloads.items())
        write("INSERT INTO events VALUES (?, ?, ?)", map(_event_row, transaction.events))
        if transaction.events_from:
            self._writer.execute("DELETE FROM events WHERE position < ?", (transaction.events_from,))

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        with self._reading:
            rows = [
                self._reader.execute("SELECT body FROM payloads WHERE key = ?", (record.key,)).fetchone()
                for record in records
            ]
        return [checked_payload(record, row[0] if row else None) for record, row in zip(records, rows, strict=True)]

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        with self._reading:
            rows = self._reader.execute(
                "SELECT position, body, crc FROM events WHERE position >= ? ORDER BY position LIMIT ?",
                (from_position, count),
            ).fetchall()
        for position, body, crc in rows:
            if zlib.crc32(body.encode()) != crc:
                raise DataLoss(f"event {position} of the history is damaged: watch from position {position + 1}")
        return [codec.load_event(body) for _, body, _ in rows]

    @contextmanager
    def copy(self) -> Iterator[Sequence[CopiedFile]]:
        with copy_folder(self._folder) as folder:
            source, target = _connect(self._folder / _FILE), sqlite3.connect(folder / _FILE)
            try:
                source.backup(target)  # one read transaction: the writer goes on
            finally:
                source.close()
                target.close()
            yield files_of(folder)

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self._folder).free

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
        self._lock.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _is_whole(damaged: list[str], name: str, body: bytes, crc: int) -> bool:
    """False, and its name in `damaged`, when the checksum is wrong."""
    is_whole = zlib.crc32(body) == crc
    if not is_whole:
        damaged.append(name)
    return is_whole


def _stream_row(state: StreamState) -> tuple[str, str, int]:
    body = codec.dump_stream(state)
    return state.name, body, zlib.crc32(body.encode())


def _prompt_row(group: Group) -> tuple[str, str, int, bytes, int]:
    prompt = group.prompt
    return group.group_id, prompt.prompt_id, prompt.priority, prompt.body, zlib.crc32(prompt.body)


def _group_row(group: Group) -> tuple[str, str, int]:
    body = codec.dump_group(group)
    return group.group_id, body, zlib.crc32(body.encode())


def _event_row(event: LedgerEvent) -> tuple[int, str, int]:
    body = codec.dump_event(event)
    return event.position, body, zlib.crc32(body.encode())
