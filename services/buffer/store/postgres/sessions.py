"""The owner's sessions with PostgreSQL, and how it recovers them after a failover or a cut of the network.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from headrace import __version__
from headrace.errors import ConfigError, Fenced, Unavailable
from headrace.rpc.log import log

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
_SCHEMA = """
CREATE TABLE IF NOT EXISTS claim (id integer PRIMARY KEY);
CREATE TABLE IF NOT EXISTS owner (id integer PRIMARY KEY, epoch bigint NOT NULL, ledger_id text NOT NULL);
ALTER TABLE owner ADD COLUMN IF NOT EXISTS commits bigint NOT NULL DEFAULT 0;
ALTER TABLE owner ADD COLUMN IF NOT EXISTS layout integer NOT NULL DEFAULT 1;
ALTER TABLE owner ADD COLUMN IF NOT EXISTS version text;
CREATE TABLE IF NOT EXISTS streams (name text PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (group_id text PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
CREATE TABLE IF NOT EXISTS groups (group_id text PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
CREATE TABLE IF NOT EXISTS samples (key text PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
CREATE TABLE IF NOT EXISTS payloads (key text PRIMARY KEY, body bytea NOT NULL);
CREATE TABLE IF NOT EXISTS events (position bigint PRIMARY KEY, body bytea NOT NULL, crc bigint NOT NULL);
ALTER TABLE payloads ALTER COLUMN body SET STORAGE EXTERNAL;
INSERT INTO claim VALUES (1) ON CONFLICT DO NOTHING;
"""
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


class Sessions:
    """Waits until the ledger is free; raises ConfigError after `claim_seconds`."""

    def __init__(self, dsn: str, schema: str, wait_seconds: float, claim_seconds: float | None) -> None:
        self._dsn = dsn
        self.schema = schema
        self.wait_seconds = wait_seconds
        self._token = secrets.token_hex(6)
        self._open: list[Session] = []
        self._reached = time.monotonic()
        self._claim_seen = 0.0
        self._is_told = False
        self._told = float("inf")
        self._open_all(claim_seconds)

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

    def _open_all(self, claim_seconds: float | None) -> None:
        while True:
            try:
                self._open_once(claim_seconds)
                return
            except AWAY as error:
                if any(mistake in str(error) for mistake in _MISTAKES):
                    raise ConfigError(f"PostgreSQL refuses buffer_postgres: {_said(error)}") from error
                self._wait_again(error, self._reached)

    def _open_once(self, claim_seconds: float | None) -> None:
        self.close()
        self.claim = self._kept("claim")
        with answered(self.claim):
            self.claim.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self.schema)))
            self.claim.execute(_SCHEMA)
        end = None if claim_seconds is None else time.monotonic() + claim_seconds
        while not self._take_claim():
            if end is not None and time.monotonic() >= end:
                raise ConfigError(f"ledger {self.schema} is in use by another buffer: stop it, or use another run_name")
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
