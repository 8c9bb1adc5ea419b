"""The ledger in PostgreSQL, in a schema of its own; for sites with a managed, replicated database.

Several servers may be started on one ledger. One owns it: it holds a row lock, taken with FOR UPDATE SKIP LOCKED, for
as long as its connection lives; the others wait for that. Each owner counts `epoch` up, and every transaction checks
it: one that was cut off and comes back is fenced, whatever it still believes.

Owned: `claim` holds the row lock of the ledger, `writer` commits under the owner's epoch.
Cut off: `recover` connects, takes the claim again, and goes on under the same epoch if no other owner came meanwhile.
Ended: another owner has increased the epoch (Fenced), or PostgreSQL was away for longer than `wait_seconds`
(Unavailable).
Every wait ends: a session whose server is silent for `ANSWER_SECONDS` is cut from this side.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg import sql

from headrace import __version__
from headrace.errors import ConfigError, FailedPrecondition, Fenced, RetryableError, Unavailable
from headrace.rpc.log import log
from services.buffer.store.base import CopiedFile, Damage
from services.buffer.store.sql import Query, SqlStore, Statement, schema

AWAY = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.IdleInTransactionSessionTimeout,
)
"""The server is gone, ends, starts, is a standby, or does not answer: what a failover looks like from here."""

Session = psycopg.Connection[Any]

LAYOUT = 1
"""The version of tables and rows; another one is refused. A field that is added with a default is no other one.

headrace 0.1.0 does not look: the next layout names its tables otherwise, so that 0.1.0 cannot write into it.
"""
_OWNER = """
CREATE TABLE IF NOT EXISTS claim (id integer PRIMARY KEY);
CREATE TABLE IF NOT EXISTS owner (id integer PRIMARY KEY, epoch bigint NOT NULL, ledger_id text NOT NULL);
ALTER TABLE owner ADD COLUMN IF NOT EXISTS commits bigint NOT NULL DEFAULT 0;
ALTER TABLE owner ADD COLUMN IF NOT EXISTS layout integer NOT NULL DEFAULT 1;
ALTER TABLE owner ADD COLUMN IF NOT EXISTS version text;
INSERT INTO claim VALUES (1) ON CONFLICT DO NOTHING;
"""
_TYPES = {"int": "bigint", "bytes": "bytea"}
_UNPACKED = "ALTER TABLE payloads ALTER COLUMN body SET STORAGE EXTERNAL"
_MISTAKES = ("authentication failed", "no password supplied", "does not exist", "pg_hba.conf")
_CLAIM_SECONDS = 0.1
_TRY_AGAIN_SECONDS = 0.5
_TELL_AGAIN_SECONDS = 10.0
_CONNECT_SECONDS = 5
ANSWER_SECONDS = 30.0
_CLAIM_CHECK_SECONDS = 1.0
_SETTINGS = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "lock_timeout": "10s",
}


_LONG_SECONDS = 2.0
"""The time after which callers are told that a commit waits."""
_LOAD_SECONDS = 600.0
_Result = TypeVar("_Result")


class Sessions:
    """Waits until the ledger is free."""

    def __init__(self, dsn: str, schema: str, wait_seconds: float) -> None:
        self._dsn = dsn
        self.schema = schema
        self.wait_seconds = wait_seconds
        self._token = secrets.token_hex(6)
        self._open: list[Session] = []
        self._reached = time.monotonic()
        self._claim_seen = 0.0
        self._is_told = False
        self._told = float("inf")
        self._open_all()

    def check_claim(self) -> None:
        """Raises one of AWAY when the claim's session has ended. It asks at most once a second."""
        if time.monotonic() - self._claim_seen > _CLAIM_CHECK_SECONDS:
            with answered(self.claim):
                self.claim.execute("SELECT 1")
            self._claim_seen = time.monotonic()

    def recover(self, since: float) -> int:
        """Connects again under the same epoch; returns the commits in the owner's row. Raises Fenced or Unavailable."""
        while True:
            try:
                return self._reconnect()
            except AWAY as error:
                self._wait_again(error, since)

    def stop_waiting(self) -> None:
        """Ends every wait for PostgreSQL with an error."""
        self.wait_seconds = 0.0
        _cut(self.writer)

    def connect(self, purpose: str) -> Session:
        """Opens a session in the ledger's schema, with the primary of a cluster."""
        session = psycopg.connect(
            self._dsn,
            autocommit=True,
            application_name=self._name(purpose),
            connect_timeout=_CONNECT_SECONDS,
            target_session_attrs="read-write",
            keepalives_idle=2,
            keepalives_interval=2,
            keepalives_count=3,
        )
        with answered(session):
            for name, value in _SETTINGS.items():
                session.execute(sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
            session.execute("SET idle_in_transaction_session_timeout = " + ("0" if purpose == "claim" else "'60s'"))
            session.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(self.schema)))
        self._reached = time.monotonic()
        return session

    def close(self) -> None:
        """Gives up the claim with its session."""
        for session in self._open:
            session.close()
        self._open = []

    def _kept(self, purpose: str) -> Session:
        session = self.connect(purpose)
        self._open.append(session)
        return session

    def _name(self, purpose: str) -> str:
        return f"headrace-{self._token}-{purpose}"

    # The first time

    def _open_all(self) -> None:
        while True:
            try:
                self._open_once()
                return
            except AWAY as error:
                if any(mistake in str(error) for mistake in _MISTAKES):
                    raise ConfigError(f"PostgreSQL refuses buffer_postgres: {_said(error)}") from error
                self._wait_again(error, self._reached)

    def _open_once(self) -> None:
        self.close()
        self.claim = self._kept("claim")
        with answered(self.claim):
            self.claim.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self.schema)))
            for statement in (_OWNER, *schema(_TYPES), _UNPACKED):
                self.claim.execute(statement.encode())
        while not self._take_claim():
            if not self._is_told:
                log.info("standing_by", ledger=self.schema)
                self._is_told = True
            time.sleep(_CLAIM_SECONDS)
        self.writer = self._kept("writer")
        with answered(self.writer):
            self._require_layout()
            ((self.epoch, self.ledger_id, self.num_commits),) = self.writer.execute(
                "INSERT INTO owner VALUES (1, 1, %s) ON CONFLICT (id) DO UPDATE SET epoch = owner.epoch + 1 "
                "RETURNING epoch, ledger_id, commits",
                (secrets.token_hex(4),),
            )
            self.writer.execute("UPDATE owner SET version = %s", (__version__,))
        log.info("ledger_owned", ledger=self.schema, owner_epoch=self.epoch)

    def _require_layout(self) -> None:
        found = self.writer.execute("SELECT layout, version FROM owner").fetchone()
        layout, version = found or (LAYOUT, None)
        if layout != LAYOUT:
            writer = f"headrace {version or '0.1.0'}"
            self.close()
            raise ConfigError(
                f"the schema {self.schema} has layout {layout} of {writer}, and headrace {__version__} reads layout "
                f"{LAYOUT}: nothing was changed. Go on with {writer}, restore a dump that {__version__} made, or "
                "choose another run_name"
            )

    def _take_claim(self) -> bool:
        """Leaves the transaction open, so that the lock ends with the session."""
        with answered(self.claim):
            self.claim.execute("BEGIN")
            taken = self.claim.execute("SELECT id FROM claim FOR UPDATE SKIP LOCKED").fetchone() is not None
            if not taken:
                self.claim.execute("ROLLBACK")
        self._reached = self._claim_seen = time.monotonic()
        return taken

    # Again

    def _reconnect(self) -> int:
        """Reads the owner's row under its lock: a commit that was cut off has either ended or been undone by then."""
        self.close()
        self.writer = self._kept("writer")
        with answered(self.writer):
            self.writer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = ANY(%s) AND pid <> pg_backend_pid()",
                ([self._name("writer"), self._name("claim")],),
            )
            self._owned("")
        self.claim = self._kept("claim")
        if not self._take_claim():
            raise psycopg.OperationalError("an older session of this buffer still holds the ledger's claim")
        with answered(self.writer), self.writer.transaction():
            num_commits = self._owned("FOR UPDATE")
        log.info("postgres_back", ledger=self.schema, owner_epoch=self.epoch)
        return num_commits

    def _owned(self, lock: LiteralString) -> int:
        ((epoch, num_commits),) = self.writer.execute(sql.SQL("SELECT epoch, commits FROM owner " + lock))  # noqa: S608  # two constants
        if epoch != self.epoch:
            raise self.fenced(epoch)
        return int(num_commits)

    def fenced(self, epoch: int) -> Fenced:
        """Returns the error for a server that is no longer the owner."""
        return Fenced(
            f"owner epoch {self.epoch} of ledger {self.schema} has ended, as epoch {epoch} owns it: this server ends"
        )

    def _wait_again(self, error: BaseException, since: float) -> None:
        """Raises Unavailable when the time is over."""
        away = time.monotonic() - since
        if away > self.wait_seconds:
            raise Unavailable(
                f"no PostgreSQL has answered at buffer_postgres for {away:.0f} s: {_said(error)}; this buffer waits "
                f"{self.wait_seconds:g} s"
            ) from error
        if away - self._told >= _TELL_AGAIN_SECONDS or away < self._told:
            log.warning("postgres_away", ledger=self.schema, away_seconds=round(away, 1), error=_said(error))
            self._told = away
        time.sleep(min(_TRY_AGAIN_SECONDS, self.wait_seconds))


class PostgresStore(SqlStore):
    """Waits until the ledger is free.

    `wait_seconds` is how long PostgreSQL may be away before `commit` gives up. The error that it raises then is final.
    All payloads are in rows: a standby on another machine has no file.
    """

    def __init__(self, dsn: str, ledger: str, *, wait_seconds: float = 120.0) -> None:
        super().__init__(PostgresDatabase(Sessions(dsn, f"headrace_{ledger}", wait_seconds)), None)


class PostgresDatabase:
    """The owner's schema."""

    name = "postgres"

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.ledger_id = sessions.ledger_id
        self._num_commits = sessions.num_commits
        self._reading = threading.Lock()
        self._reader: Session | None = None
        self._since: float | None = None
        self._error = ""

    def load(self, read: Callable[[Query], _Result]) -> _Result:
        while True:
            since = time.monotonic()
            try:
                with answered(self._sessions.writer, _LOAD_SECONDS):
                    return read(self._rows)
            except AWAY:
                self._num_commits = self._sessions.recover(since)

    def _rows(self, query: str) -> Iterable[tuple[Any, ...]]:
        return self._sessions.writer.execute(query.encode(), binary=True)

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

    def transact(self, statements: Sequence[Statement]) -> None:
        """Repeats a commit that was cut off, unless the owner's row shows that it is durable."""
        self._since = since = time.monotonic()
        try:
            while not self._try_commit(statements):
                num_commits = self._sessions.recover(since)
                if num_commits == self._num_commits + 1:
                    break
            self._num_commits += 1
        finally:
            self._since, self._error = None, ""

    def _try_commit(self, statements: Sequence[Statement]) -> bool:
        """Returns False when PostgreSQL is away; whether the commit is durable is then unknown."""
        try:
            self._sessions.check_claim()
            self._commit(statements)
        except AWAY as error:
            self._error = _said(error)
            log.warning("postgres_away", error=self._error)
            return False
        except psycopg.Error as error:
            raise OSError(f"PostgreSQL did not commit a transaction: {str(error).strip()}") from error
        return True

    def _commit(self, statements: Sequence[Statement]) -> None:
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
            for query, values in statements:
                writer.execute(_with_marks(query), values)

    def _not_ours(self, epoch: int, num_commits: int) -> Exception:
        if epoch != self._sessions.epoch:
            return self._sessions.fenced(epoch)
        return OSError(f"PostgreSQL has {num_commits} commits of this owner, which sent {self._num_commits}")

    def query(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Repeats the query once when its session was cut."""
        with self._reading:
            for _ in range(2):
                if away := self.waiting_for:
                    raise away
                try:
                    self._reader = self._reader or self._sessions.connect("reader")
                    with answered(self._reader):
                        return self._reader.execute(_with_marks(sql), values, binary=True).fetchall()
                except AWAY as error:
                    why = _said(error)
                    self._end_reader()
            raise Unavailable(f"PostgreSQL does not answer ({why}): try again")

    def _end_reader(self) -> None:
        if self._reader:
            self._reader.close()
            self._reader = None

    def copy(
        self, writing: AbstractContextManager[Any], files: Callable[[], Sequence[str]]
    ) -> AbstractContextManager[Sequence[CopiedFile]]:
        raise FailedPrecondition(
            "a ledger in PostgreSQL is copied by PostgreSQL, while it serves: "
            f"pg_dump --schema {self._sessions.schema} DATABASE > FILE; psql DATABASE < FILE brings it back"
        )

    def damage(self) -> Sequence[Damage]:
        return ()

    def free_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        self._end_reader()
        self._sessions.close()


def _with_marks(query: str) -> bytes:
    """Values are sent in binary: as text, bytes would be twice as long."""
    return query.replace("?", "%b").encode()


@contextmanager
def answered(session: Session, seconds: float = ANSWER_SECONDS) -> Iterator[None]:
    """Cuts the session when the calls inside take longer, because a hanging server does not keep its own timeout."""
    timer = threading.Timer(seconds, _cut, (session,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _cut(session: Session) -> None:
    with (
        suppress(psycopg.Error, OSError),  # it has ended by itself
        socket.socket(fileno=os.dup(session.fileno())) as connection,
    ):
        connection.shutdown(socket.SHUT_RDWR)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())
