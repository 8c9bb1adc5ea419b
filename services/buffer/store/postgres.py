"""The ledger's rows in PostgreSQL, one schema for each ledger; for sites with a managed, replicated database.

Several servers may be started on one ledger. One owns it: it holds a row lock, taken with FOR UPDATE SKIP LOCKED, for
as long as its connection lives; the others wait for that. Each owner counts `epoch` up, and every transaction checks
it: one that was cut off and comes back is fenced, whatever it still believes.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import psycopg
from psycopg import sql

from headrace.errors import ConfigError, DataLoss, FailedPrecondition, Fenced
from headrace.rpc.log import log
from services.buffer.group import Group, Prompt, SampleRecord
from services.buffer.store import rows as codec
from services.buffer.store.base import Damage, Snapshot
from services.buffer.store.copy import CopiedFile
from services.buffer.store.payload import checked_payload
from services.buffer.transaction import LedgerEvent, Payload, Transaction

_SCHEMA = """
CREATE TABLE IF NOT EXISTS claim (id integer PRIMARY KEY);
CREATE TABLE IF NOT EXISTS owner (id integer PRIMARY KEY, epoch bigint NOT NULL, ledger_id text NOT NULL);
CREATE TABLE IF NOT EXISTS streams (name text PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (group_id text PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
CREATE TABLE IF NOT EXISTS groups (group_id text PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
CREATE TABLE IF NOT EXISTS samples (key text PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
CREATE TABLE IF NOT EXISTS payloads (key text PRIMARY KEY, body bytea NOT NULL);
CREATE TABLE IF NOT EXISTS events (position bigint PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
ALTER TABLE payloads ALTER COLUMN body SET STORAGE EXTERNAL;
INSERT INTO claim VALUES (1) ON CONFLICT DO NOTHING;
"""
_UPSERT = "INSERT INTO {0} VALUES (%s, %b, %s) ON CONFLICT ({1}) DO UPDATE SET body = excluded.body, crc = excluded.crc"
_CLAIM_SECONDS = 0.1


class PostgresStore:
    """Waits until the ledger is free, or raises ConfigError after `claim_seconds`. Any error of `commit` is final."""

    name = "postgres"

    def __init__(self, dsn: str, ledger: str, *, claim_seconds: float | None = None) -> None:
        self._dsn = dsn
        self._schema = f"headrace_{ledger}"
        self._claim = self._connect()
        self._claim.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._schema)))
        self._claim.execute(_SCHEMA)
        self._wait_for_claim(claim_seconds)
        self._writer = self._connect()
        self._reader = self._connect()
        self._reading = threading.Lock()
        self._epoch, self._ledger_id = self._next_epoch()
        self._damage: tuple[Damage, ...] = ()

    def load(self) -> Snapshot:
        damaged: list[str] = []
        streams = [codec.load_stream(body) for _, body in self._rows("streams", "name", damaged)]
        if damaged:
            raise DataLoss(f"the records {damaged} are damaged, nothing can go on without: restore a backup")
        prompts = {key: codec.load_prompt(body) for key, body in self._rows("prompts", "group_id", damaged)}
        records = {key: codec.load_sample(body) for key, body in self._rows("samples", "key", damaged)}
        groups = [
            group
            for group_id, body in self._rows("groups", "group_id", damaged)
            if (group := _group(group_id, body, prompts, records, damaged))
        ]
        (oldest, position) = _one(
            self._writer.execute("SELECT coalesce(min(position), 1), coalesce(max(position), 0) FROM events")
        )
        self._damage = tuple(map(Damage, damaged))
        return Snapshot(self._ledger_id, tuple(streams), tuple(groups), position, oldest)

    def commit(self, transactions: Sequence[Transaction]) -> None:
        try:
            self._commit(transactions)
        except psycopg.Error as error:
            raise OSError(f"PostgreSQL did not keep a transaction: {str(error).strip()}") from error

    def _commit(self, transactions: Sequence[Transaction]) -> None:
        with self._writer.transaction():
            (epoch,) = _one(self._writer.execute("SELECT epoch FROM owner FOR SHARE"))
            if epoch != self._epoch:
                raise Fenced(
                    f"owner epoch {self._epoch} of ledger {self._schema} has ended, {epoch} owns it: this server ends"
                )
            with self._writer.cursor() as cursor:
                for transaction in transactions:
                    _write(cursor.executemany, transaction)

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        keys = [record.key for record in records]
        with self._reading:
            rows: dict[str, bytes] = dict(
                self._reader.execute("SELECT key, body FROM payloads WHERE key = ANY(%s)", (keys,), binary=True)
            )
        return [checked_payload(record, rows.get(record.key)) for record in records]

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        with self._reading:
            rows = self._reader.execute(
                "SELECT position, body, crc FROM events WHERE position >= %s ORDER BY position LIMIT %s",
                (from_position, count),
            ).fetchall()
        for position, body, crc in rows:
            if _crc(str(position), body) != crc:
                raise DataLoss(f"event {position} of the history is damaged: watch from position {position + 1}")
        return [codec.load_event(body) for _, body, _ in rows]

    def copy(self) -> AbstractContextManager[Sequence[CopiedFile]]:
        raise FailedPrecondition(
            "a ledger in PostgreSQL is copied by PostgreSQL, while it serves: "
            f"pg_dump --schema {self._schema} DATABASE > FILE; psql DATABASE < FILE brings it back"
        )

    def damage(self) -> Sequence[Damage]:
        return self._damage

    def free_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        for connection in (self._writer, self._reader, self._claim):
            connection.close()

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            connection = psycopg.connect(
                self._dsn,
                autocommit=True,
                connect_timeout=10,
                keepalives_idle=2,
                keepalives_interval=2,
                keepalives_count=3,
            )
        except psycopg.OperationalError as error:
            raise ConfigError(f"no PostgreSQL answers at buffer_postgres: {str(error).strip()}") from error
        path = sql.SQL("SET search_path TO {}").format(sql.Identifier(self._schema))
        connection.execute(path)
        return connection

    def _wait_for_claim(self, claim_seconds: float | None) -> None:
        """Its transaction stays open: the lock ends with the connection."""
        end = None if claim_seconds is None else time.monotonic() + claim_seconds
        is_told = False
        self._claim.execute("SET idle_in_transaction_session_timeout = 0")
        while True:
            self._claim.execute("BEGIN")
            if self._claim.execute("SELECT id FROM claim FOR UPDATE SKIP LOCKED").fetchone():
                return
            self._claim.execute("ROLLBACK")
            if end is not None and time.monotonic() >= end:
                raise ConfigError(
                    f"ledger {self._schema} is in use by another buffer: stop it, or use another run_name"
                )
            if not is_told:
                log.info("standing_by", ledger=self._schema)
                is_told = True
            time.sleep(_CLAIM_SECONDS)

    def _next_epoch(self) -> tuple[int, str]:
        row: tuple[int, str] = _one(
            self._writer.execute(
                "INSERT INTO owner VALUES (1, 1, %s) ON CONFLICT (id) DO UPDATE SET epoch = owner.epoch + 1 "
                "RETURNING epoch, ledger_id",
                (secrets.token_hex(4),),
            )
        )
        log.info("ledger_owned", ledger=self._schema, owner_epoch=row[0])
        return row

    def _rows(self, table: str, key: str, damaged: list[str]) -> Iterable[tuple[str, bytes]]:
        query = sql.SQL("SELECT {}, body, crc FROM {}").format(sql.Identifier(key), sql.Identifier(table))
        for name, body, crc in self._writer.execute(query, binary=True):
            if _crc(name, body) == crc:
                yield name, body
            else:
                damaged.append(f"{table}/{name}")


def _write(executemany: Callable[[Any, Iterable[Sequence[Any]]], None], transaction: Transaction) -> None:
    rows = codec.to_rows(transaction)
    for statement, values in (
        (_UPSERT.format("streams", "name"), [_row(r.name, r.body) for r in rows.streams]),
        (_UPSERT.format("prompts", "group_id"), [_row(r.group_id, r.body) for r in rows.prompts]),
        (_UPSERT.format("groups", "group_id"), [_row(r.group_id, r.body) for r in rows.groups]),
        ("DELETE FROM groups WHERE group_id = %s", [(group_id,) for group_id in rows.forgotten]),
        ("DELETE FROM prompts WHERE group_id = %s", [(group_id,) for group_id in rows.forgotten]),
        ("DELETE FROM payloads WHERE key = %s", [(key,) for key in transaction.deleted_payloads]),
        ("DELETE FROM samples WHERE key = %s", [(key,) for key in rows.deleted]),
        (_UPSERT.format("samples", "key"), [_row(r.key, r.body) for r in rows.samples]),
        (
            "INSERT INTO payloads VALUES (%s, %b) ON CONFLICT (key) DO UPDATE SET body = excluded.body",
            [(key, bytes(payload)) for key, payload in transaction.payloads.items()],
        ),
        ("INSERT INTO events VALUES (%s, %b, %s)", [_event_row(r) for r in rows.events]),
        ("DELETE FROM events WHERE position < %s", [(rows.events_from,)] if rows.events_from else []),
    ):
        if values:
            executemany(statement, values)


def _group(
    group_id: str, body: bytes, prompts: dict[str, Prompt], records: dict[str, SampleRecord], damaged: list[str]
) -> Group | None:
    try:
        return codec.load_group(body, prompts[group_id], records)
    except KeyError:  # its prompt or a sample is damaged
        damaged.append(f"groups/{group_id}")
        return None


def _row(key: str, body: Any) -> tuple[str, bytes, int]:
    return key, bytes(body), _crc(key, body)


def _event_row(row: codec.EventRow) -> tuple[int, bytes, int]:
    return row.position, bytes(row.body), _crc(str(row.position), row.body)


def _crc(key: str, body: Any) -> int:
    return zlib.crc32(body, zlib.crc32(key.encode()))


def _one(cursor: psycopg.Cursor[Any]) -> Any:
    row = cursor.fetchone()
    assert row is not None  # the query always has a row
    return row
