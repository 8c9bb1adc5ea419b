"""The ledger's rows in PostgreSQL, one schema for each ledger; for sites with a managed, replicated database.

Several servers may be started on one ledger. One owns it: it holds a row lock, taken with FOR UPDATE SKIP LOCKED, for
as long as its connection lives; the others wait for that. Each owner counts `epoch` up, and every transaction checks
it: one that was cut off and comes back is fenced, whatever it still believes.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from headrace.errors import DataLoss, FailedPrecondition, RetryableError, Unavailable
from headrace.protobuf import Payload
from headrace.rpc.log import log
from services.buffer.ledger.group import Group, Prompt, SampleRecord
from services.buffer.ledger.transaction import LedgerEvent, Transaction
from services.buffer.store import rows as codec
from services.buffer.store.base import Damage, Snapshot
from services.buffer.store.copy import CopiedFile
from services.buffer.store.payload import checked_payload
from services.buffer.store.postgres.sessions import AWAY, Session, Sessions, answered

_UPSERT = "INSERT INTO {0} VALUES (%s, %b, %s) ON CONFLICT ({1}) DO UPDATE SET body = excluded.body, crc = excluded.crc"
_LONG_SECONDS = 2.0
"""The time after which callers are told that a commit waits."""
_LOAD_SECONDS = 600.0


class PostgresStore:
    """Waits until the ledger is free; raises ConfigError after `claim_seconds`.

    `wait_seconds` is how long PostgreSQL may be away before `commit` gives up. The error that it raises then is final.
    """

    name = "postgres"

    def __init__(
        self, dsn: str, ledger: str, *, wait_seconds: float = 120.0, claim_seconds: float | None = None
    ) -> None:
        self._sessions = Sessions(dsn, f"headrace_{ledger}", wait_seconds, claim_seconds)
        self._num_commits = self._sessions.num_commits
        self._reading = threading.Lock()
        self._reader: Session | None = None
        self._since: float | None = None
        self._error = ""
        self._damage: tuple[Damage, ...] = ()

    def load(self) -> Snapshot:
        while True:
            since = time.monotonic()
            try:
                with answered(self._sessions.writer, _LOAD_SECONDS):
                    return self._load()
            except AWAY:
                self._num_commits = self._sessions.recover(since)

    def _load(self) -> Snapshot:
        damaged: list[str] = []
        streams = [codec.load_stream(body) for _, body in self._rows("streams", "name", damaged)]
        if damaged:
            raise DataLoss(
                f"the records {damaged} of the schema {self._sessions.schema} are damaged, and the ledger cannot start "
                "without them: rename the schema and restore it from a backup of the database, or choose another "
                "run_name"
            )
        prompts = {key: codec.load_prompt(body) for key, body in self._rows("prompts", "group_id", damaged)}
        records = {key: codec.load_sample(body) for key, body in self._rows("samples", "key", damaged)}
        groups = [
            group
            for group_id, body in self._rows("groups", "group_id", damaged)
            if (group := _group(group_id, body, prompts, records, damaged))
        ]
        ((oldest, position),) = self._sessions.writer.execute(
            "SELECT coalesce(min(position), 1), coalesce(max(position), 0) FROM events"
        )
        self._damage = tuple(map(Damage, damaged))
        lost = {name.partition("/")[2] for name in damaged if not name.startswith("samples/")}
        lost_groups = tuple(sorted(lost - {group.group_id for group in groups}))
        return Snapshot(
            self._sessions.ledger_id, tuple(streams), tuple(groups), position, oldest, lost_groups=lost_groups
        )

    @property
    def waiting_for(self) -> RetryableError | None:
        """Says that PostgreSQL is away while a commit waits for it; None while it answers."""
        since = self._since
        if since is None:
            return None
        seconds = time.monotonic() - since
        if seconds < _LONG_SECONDS and not self._error:
            return None
        why = f" ({self._error})" if self._error else ""
        return Unavailable(
            f"PostgreSQL has not answered for {seconds:.0f} s{why}: the buffer waits for it, "
            f"{self._sessions.wait_seconds:g} s at most, and then goes on; try again"
        )

    def stop_waiting(self) -> None:
        self._sessions.stop_waiting()

    def prepare(self, transactions: Sequence[Transaction]) -> None:
        pass

    def commit(self, transactions: Sequence[Transaction]) -> None:
        """Repeats a commit that was cut off, unless the owner's row shows that it is durable."""
        self._since = since = time.monotonic()
        try:
            while not self._try_commit(transactions):
                num_commits = self._sessions.recover(since)
                if num_commits == self._num_commits + 1:
                    break
            self._num_commits += 1
        finally:
            self._since, self._error = None, ""

    def _try_commit(self, transactions: Sequence[Transaction]) -> bool:
        """Returns False when PostgreSQL is away; whether the commit is durable is then unknown."""
        try:
            self._sessions.check_claim()
            self._commit(transactions)
        except AWAY as error:
            self._error = " ".join(str(error).split())
            log.warning("postgres_away", error=self._error)
            return False
        except psycopg.Error as error:
            raise OSError(f"PostgreSQL did not commit a transaction: {str(error).strip()}") from error
        return True

    def _commit(self, transactions: Sequence[Transaction]) -> None:
        """Locks the owner's row first: no other owner and no earlier attempt commits at the same time."""
        writer = self._sessions.writer
        with answered(writer), writer.transaction():
            updated = writer.execute(
                "UPDATE owner SET commits = commits + 1 WHERE epoch = %s AND commits = %s",
                (self._sessions.epoch, self._num_commits),
            )
            if updated.rowcount != 1:
                ((epoch, num_commits),) = writer.execute("SELECT epoch, commits FROM owner")
                raise self._not_ours(epoch, num_commits)
            with writer.cursor() as cursor:
                for transaction in transactions:
                    _write(cursor.executemany, transaction)

    def _not_ours(self, epoch: int, num_commits: int) -> Exception:
        if epoch != self._sessions.epoch:
            return self._sessions.fenced(epoch)
        return OSError(f"PostgreSQL has {num_commits} commits of this owner, which sent {self._num_commits}")

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        keys = [record.key for record in records]
        found: dict[str, bytes] = dict(
            self._read("SELECT key, body FROM payloads WHERE key = ANY(%s)", (keys,), binary=True)
        )
        return [checked_payload(record, found.get(record.key)) for record in records]

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        """Stops before the first damaged event; raises DataLoss when that is the first one asked for."""
        events: list[LedgerEvent] = []
        for position, body, crc in self._read(
            "SELECT position, body, crc FROM events WHERE position >= %s ORDER BY position LIMIT %s",
            (from_position, count),
        ):
            if _crc(str(position), body) != crc:
                if events:
                    break
                raise DataLoss(
                    f"event {position} of the history is damaged: watch from position {position + 1}",
                    next_position=str(position + 1),
                )
            events.append(codec.load_event(body))
        return events

    def _read(self, query: LiteralString, values: Sequence[Any], *, binary: bool = False) -> list[Any]:
        """Repeats the query once when its session was cut. Raises Unavailable while PostgreSQL is away."""
        with self._reading:
            for _ in range(2):
                if away := self.waiting_for:
                    raise away
                try:
                    self._reader = self._reader or self._sessions.connect("reader")
                    with answered(self._reader):
                        return self._reader.execute(query, values, binary=binary).fetchall()
                except AWAY as error:
                    why = " ".join(str(error).split())
                    self._end_reader()
            raise Unavailable(f"PostgreSQL does not answer ({why}): try again")

    def _end_reader(self) -> None:
        if self._reader:
            self._reader.close()
            self._reader = None

    def copy(self) -> AbstractContextManager[Sequence[CopiedFile]]:
        raise FailedPrecondition(
            "a ledger in PostgreSQL is copied by PostgreSQL, while it serves: "
            f"pg_dump --schema {self._sessions.schema} DATABASE > FILE; psql DATABASE < FILE brings it back"
        )

    def damage(self) -> Sequence[Damage]:
        return self._damage

    def free_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        self._end_reader()
        self._sessions.close()

    def _rows(self, table: str, key: str, damaged: list[str]) -> Iterable[tuple[str, bytes]]:
        query = sql.SQL("SELECT {}, body, crc FROM {}").format(sql.Identifier(key), sql.Identifier(table))
        for name, body, crc in self._sessions.writer.execute(query, binary=True):
            if _crc(name, body) == crc:
                yield name, body
            else:
                damaged.append(f"{table}/{name}")


def _write(executemany: Callable[[Any, Iterable[Sequence[Any]]], None], transaction: Transaction) -> None:
    rows = codec.to_rows(transaction)
    for statement, values in (
        (_UPSERT.format("streams", "name"), [_row(*row) for row in rows.streams]),
        (_UPSERT.format("prompts", "group_id"), [_row(*row) for row in rows.prompts]),
        (_UPSERT.format("groups", "group_id"), [_row(*row) for row in rows.groups]),
        ("DELETE FROM groups WHERE group_id = %s", [(group_id,) for group_id in rows.forgotten]),
        ("DELETE FROM prompts WHERE group_id = %s", [(group_id,) for group_id in rows.forgotten]),
        ("DELETE FROM payloads WHERE key = %s", [(key,) for key in transaction.deleted_payloads]),
        ("DELETE FROM samples WHERE key = %s", [(key,) for key in rows.deleted]),
        (_UPSERT.format("samples", "key"), [_row(r.key, codec.dump_sample(r)) for r in chain(*rows.samples)]),
        (
            "INSERT INTO payloads VALUES (%s, %b) ON CONFLICT (key) DO UPDATE SET body = excluded.body",
            [(key, bytes(payload)) for key, payload in transaction.payloads.items()],
        ),
        ("INSERT INTO events VALUES (%s, %b, %s)", [(at, body, _crc(str(at), body)) for at, body in rows.events]),
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


def _row(key: str, body: bytes) -> tuple[str, bytes, int]:
    return key, body, _crc(key, body)


def _crc(key: str, body: Any) -> int:
    return zlib.crc32(body, zlib.crc32(key.encode()))
