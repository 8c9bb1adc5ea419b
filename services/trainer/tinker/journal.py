"""What clients have request, and what they were answered, in a SQLite file of the run's folder: it survives a restart.

A request is written before it is begun. After a restart a model is loaded as it was saved last, and the requests since
then are carried out again, in their order: training is deterministic, so that the model is the same.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.trainer.tinker.work import LoraSpec

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS models (
  id TEXT PRIMARY KEY, session TEXT NOT NULL, spec BLOB NOT NULL, saved_seq INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, session TEXT NOT NULL, path TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (
  id TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
  body BLOB NOT NULL, media_type TEXT, result BLOB, answered REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_of ON requests (owner, seq);
"""

_FORGOTTEN = ""
"""The media type of a result that is not kept any more"""


@dataclass(frozen=True, slots=True)
class Model:
    """`saved_seq`: the last request that the state on the disk covers; -1: there is none."""

    model_id: str
    session: str
    spec: LoraSpec
    saved_seq: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """`path`: a tinker:// path of an adapter; None: the base."""

    sampler_id: str
    session: str
    path: str | None


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request as it came. `owner`: its model or its sampler, in whose order of `seq` it is."""

    request_id: str
    session: str
    owner: str
    seq: int
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """The body of the response."""

    media_type: str
    body: bytes


class Journal:
    """Synchronous: a write takes a fraction of a millisecond, as it waits for no disk."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(file, isolation_level=None)
        self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)

    def close(self) -> None:
        self._db.close()

    def add_session(self, session: str) -> None:
        self._db.execute("INSERT INTO sessions VALUES (?)", (session,))

    def sessions(self) -> list[str]:
        return [row[0] for row in self._db.execute("SELECT id FROM sessions")]

    def end_session(self, session: str) -> None:
        """Forgets everything that belongs to it."""
        self._db.execute("DELETE FROM sessions WHERE id = ?", (session,))
        for table in ("models", "samplers", "requests"):
            self._db.execute(f"DELETE FROM {table} WHERE session = ?", (session,))  # noqa: S608  # a constant

    def add_model(self, model: Model) -> None:
        row = (model.model_id, model.session, msgspec.json.encode(model.spec), model.saved_seq)
        self._db.execute("INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?)", row)

    def models(self) -> list[Model]:
        rows = self._db.execute("SELECT id, session, spec, saved_seq FROM models")
        return [Model(i, session, msgspec.json.decode(spec, type=LoraSpec), seq) for i, session, spec, seq in rows]

    def saved(self, model_id: str, seq: int) -> None:
        """The model is on the disk as it was after this request: no request up to it is carried out again."""
        self._db.execute("UPDATE models SET saved_seq = ? WHERE id = ?", (seq, model_id))
        self._db.execute(
            "UPDATE requests SET body = x'' WHERE owner = ? AND seq <= ? AND media_type IS NOT NULL", (model_id, seq)
        )

    def add_sampler(self, sampler: Sampler) -> None:
        row = (sampler.sampler_id, sampler.session, sampler.path)
        self._db.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?)", row)

    def samplers(self) -> list[Sampler]:
        return [Sampler(*row) for row in self._db.execute("SELECT id, session, path FROM samplers")]

    def add(self, request: QueuedRequest) -> bool:
        """False where the request is there already: a client that heard no response asks again."""
        row = (request.request_id, request.session, request.owner, request.seq, request.kind, request.body)
        made = self._db.execute(
            "INSERT OR IGNORE INTO requests (id, session, owner, seq, kind, body) VALUES (?, ?, ?, ?, ?, ?)", row
        )
        return made.rowcount == 1

    def answer(self, request_id: str, outcome: Outcome, now: float) -> None:
        self._db.execute(
            "UPDATE requests SET media_type = ?, result = ?, answered = ? WHERE id = ?",
            (outcome.media_type, outcome.body, now, request_id),
        )

    def outcome(self, request_id: str) -> Outcome | None:
        """None while there is none. Raises KeyError for a request that is not known."""
        row = self._db.execute("SELECT media_type, result FROM requests WHERE id = ?", (request_id,)).fetchone()
        if row is None or row[0] == _FORGOTTEN:
            raise KeyError(request_id)
        return None if row[0] is None else Outcome(*row)

    def since(self, owner: str, seq: int) -> Iterator[tuple[QueuedRequest, bool]]:
        """The owner's requests after `seq`, in order, and whether each is answered."""
        rows = self._db.execute(
            "SELECT id, session, owner, seq, kind, body, media_type IS NOT NULL FROM requests "
            "WHERE owner = ? AND seq > ? ORDER BY seq",
            (owner, seq),
        )
        yield from ((QueuedRequest(*row[:-1]), bool(row[-1])) for row in rows.fetchall())

    def answered(self, owner: str) -> Sequence[tuple[str, int]]:
        """(request, bytes of its result) of the owner, in the order of the answers."""
        rows = self._db.execute(
            "SELECT id, length(result) FROM requests WHERE owner = ? AND answered IS NOT NULL ORDER BY answered",
            (owner,),
        )
        return rows.fetchall()

    def forget_results(self, kind: str, before: float) -> None:
        """Of requests of a kind that were answered before then. They still count among the answered ones."""
        self._db.execute(
            "UPDATE requests SET body = x'', result = x'', media_type = ? WHERE kind = ? AND answered < ?",
            (_FORGOTTEN, kind, before),
        )
