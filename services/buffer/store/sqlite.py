"""The ledger in a folder: `ledger.sqlite` holds every row and is the only truth, files of large calls lie beside it.

WAL and synchronous=FULL: a transaction is on the disk when its COMMIT returns. A full disk is waited out. The file
`position` says how far the ledger has come at least, as SQLite does not notice that its log was cut.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from crc32c import crc32c

from headrace import __version__
from headrace.disk import lock, sync
from headrace.errors import ConfigError, DataLoss, DiskFull, RetryableError
from headrace.rpc.log import log
from services.buffer.ledger.state import Transaction
from services.buffer.store import release_0_1, salvage
from services.buffer.store.base import CopiedFile, Damage
from services.buffer.store.payload_files import DiskFiles, PayloadFiles
from services.buffer.store.sql import LARGE_CALL_BYTES, Query, SqlStore, Statement, checksum, schema

FILE = "ledger.sqlite"
PAYLOADS = "payloads"
LAYOUT = 4
"""The version of tables and rows; another one is refused. A field that is added with a default is no other one."""
_VERSION = "headrace"
"""The key of the release that opened the ledger last."""
_TYPES = {"int": "INTEGER", "bytes": "BLOB"}
_PAGE_CACHE_KIB = 4 << 10
"""Of each connection. The pages that commits touch again are few: a larger one is no faster, and fills for hours."""
_LOG_BYTES = 16 << 20
"""What is left of SQLite's log after a large transaction, or a long copy, once it was moved to the database."""
_RETRY_SECONDS = 0.5
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FEW_BYTES = 256 << 10
"""The free space below which SQLite has no room for its log and reports an I/O error."""
_Result = TypeVar("_Result")
Connect = Callable[[Path], sqlite3.Connection]


def connect(path: Path, factory: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    """Opens the database so that every transaction is on the disk when its COMMIT returns."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0, factory=factory)
    connection.text_factory = salvage.decode_text
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    connection.execute(f"PRAGMA cache_size = -{_PAGE_CACHE_KIB}")
    return connection


class SqliteStore(SqlStore):
    """`folder`/ledger.sqlite and `folder`/payloads/. Raises ConfigError when another process has the folder."""

    def __init__(
        self,
        folder: Path,
        *,
        large_call_bytes: int = LARGE_CALL_BYTES,
        open_files: Callable[[Path], DiskFiles] = DiskFiles,
        connect_writer: Connect = connect,
    ) -> None:
        lock_file = _lock_folder(folder)
        with ExitStack() as on_failure:
            on_failure.callback(lock_file.close)
            with _disk_errors(folder), _refusals(folder):
                files = open_files(folder / PAYLOADS)
                database = SqliteDatabase(folder, files, connect_writer)
                super().__init__(database, PayloadFiles(files, database.full_disk.outlast), large_call_bytes)
            on_failure.pop_all()
        database.closes.insert(0, lock_file.close)
        self._mark = database.mark

    def commit(self, transactions: Sequence[Transaction]) -> None:
        super().commit(transactions)
        if positions := [t.events[-1].position for t in transactions if t.events]:
            self._mark.write(self._database.ledger_id, positions[-1])


class SqliteDatabase:
    """The folder's `ledger.sqlite`, opened, checked, and created where it is new."""

    name = "sqlite"

    def __init__(self, folder: Path, files: DiskFiles, connect_writer: Connect) -> None:
        """Raises DataLoss when the ledger cannot continue without breaking a promise."""
        self._folder, self._path, self._files = folder, folder / FILE, files
        self.full_disk = FullDisk(folder)
        sync(folder)  # the name of payloads/
        sync(folder.parent)
        _delete_copies(folder)
        salvage.delete_drafts(folder)
        is_new = not any(name.endswith(".payloads") for name in files.names()) and not (folder / MARK).exists()
        if not (is_new or self._path.exists()):
            raise DataLoss(
                f"{self._path} is gone, and the files beside it cannot be read without it (put it back if you have it)"
            )
        self.mark = PositionMark(folder / MARK)
        self.closes: list[Callable[[], None]] = [self.mark.close]
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._writer = self._open(connect_writer, is_new=is_new)
            self.closes.append(self._writer.close)
            self._reader = connect(self._path)
            self.closes.append(self._reader.close)
            self.ledger_id = self._name_ledger()
            self._salvaged = salvage.salvaged(self._writer)
            on_failure.pop_all()
        self._reading = threading.Lock()

    def _open(self, connect_writer: Connect, *, is_new: bool) -> sqlite3.Connection:
        """Damage of a ledger that was closed is salvaged; where a log is replayed it is refused."""
        log_file = self._path.with_name(f"{FILE}-wal")
        was_closed = not (log_file.exists() and log_file.stat().st_size)
        if was_closed and self._path.exists():
            with closing(salvage.read_only(self._path)) as found:
                if self._check(found, is_new=is_new) == LAYOUT:
                    salvage.salvage_damaged(self._path, found, self._create)
        connection = connect_writer(self._path)
        with ExitStack() as on_failure:
            on_failure.callback(lambda: connection.close())  # the one that is open then
            layout = self._check(connection, is_new=is_new)
            if layout == LAYOUT and not was_closed:
                salvage.check_pages(connection, self._path)
            if layout == release_0_1.LAYOUT:
                connection.close()
                release_0_1.convert(self._path, self._create)
                connection = connect_writer(self._path)
            self._create(connection)
            on_failure.pop_all()
        return connection

    def _check(self, connection: sqlite3.Connection, *, is_new: bool) -> int:
        """Returns the layout, LAYOUT for a new file. Raises ConfigError for one that is not read."""
        (layout,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
        if not num_tables:
            if not is_new:
                raise DataLoss(f"{self._path} is empty, or its log ({FILE}-wal) is gone (put it back if you have it)")
            return LAYOUT
        if layout not in (LAYOUT, release_0_1.LAYOUT):
            raise _another_layout(self._path, layout, _meta(connection, _VERSION))
        (position,) = connection.execute("SELECT COALESCE(MAX(position), 0) FROM events").fetchone()
        self.mark.require(_meta(connection, "ledger_id") if layout == LAYOUT else None, position)
        return int(layout)

    def _create(self, connection: sqlite3.Connection) -> None:
        """Creates missing tables and writes which release has opened the ledger, for a refusal to name it."""
        if connection.execute("PRAGMA user_version").fetchone() != (LAYOUT,):
            with salvage.transaction(connection):
                connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL)")
                for statement in schema(_TYPES):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {LAYOUT}")
        if _meta(connection, _VERSION) != __version__:
            salvage.write_meta(connection, _VERSION, __version__)

    def _name_ledger(self) -> str:
        ledger_id = _meta(self._writer, "ledger_id")
        if ledger_id is None:
            ledger_id = secrets.token_hex(4)  # leases that are out keep theirs: it tells new ones apart
            salvage.write_meta(self._writer, "ledger_id", ledger_id)
            (position,) = self._writer.execute("SELECT COALESCE(MAX(position), 0) FROM events").fetchone()
            self.mark.write(ledger_id, position)
        return ledger_id

    def transact(self, statements: Sequence[Statement]) -> None:
        self.full_disk.outlast(lambda: self._transact(statements))

    def _transact(self, statements: Sequence[Statement]) -> None:
        try:
            with salvage.transaction(self._writer):
                for sql, values in statements:
                    self._writer.execute(sql, values)
        except sqlite3.DatabaseError as error:
            if not _is_corrupt(error):
                raise
            raise self._damaged(error) from error

    def load(self, read: Callable[[Query], _Result]) -> _Result:
        with _disk_errors(self._folder), _refusals(self._folder):
            return read(self._writer.execute)

    def query(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        try:
            with self._reading:
                return self._reader.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: sqlite3.DatabaseError) -> DataLoss:
        """Has the next start check the whole file, however large it is."""
        if _is_corrupt(error):
            salvage.suspect(self._path)
        return DataLoss(f"pages of {self._path} cannot be read ({error})")

    @contextmanager
    def copy(
        self, writing: AbstractContextManager[Any], files: Callable[[], Sequence[str]]
    ) -> Iterator[Sequence[CopiedFile]]:
        with _copy_folder(self._folder) as folder:
            (folder / PAYLOADS).mkdir()
            with closing(connect(self._path)) as source, closing(sqlite3.connect(folder / FILE)) as target:
                with writing:
                    source.execute("BEGIN")
                    source.execute("SELECT COUNT(*) FROM meta").fetchone()
                    for name in files():
                        (folder / PAYLOADS / name).hardlink_to(self._folder / PAYLOADS / name)
                source.backup(target)  # of the moment that is pinned: the writer continues
            yield _files_of(folder)

    def damage(self) -> Sequence[Damage]:
        return self._salvaged

    def free_bytes(self) -> int | None:
        return self._files.free_bytes()

    @property
    def waiting_for(self) -> RetryableError | None:
        return self.full_disk.refusal

    def stop_waiting(self) -> None:
        self.full_disk.stop()

    def close(self) -> None:
        while self.closes:
            self.closes.pop()()


def _meta(connection: sqlite3.Connection, key: str) -> str | None:
    """None where it is not written, or cannot be read."""
    try:
        row = connection.execute("SELECT body, crc FROM meta WHERE key = ?", (key,)).fetchone()
    except sqlite3.Error:
        return None
    is_whole = row is not None and isinstance(row[0], bytes) and checksum(key, row[0]) == row[1]
    return row[0].decode(errors="replace") if is_whole else None


def _another_layout(path: Path, layout: int, version: str | None) -> ConfigError:
    age = "a newer" if layout > LAYOUT else "an older"
    writer = f"headrace {version}" if version else f"{age} headrace"
    return ConfigError(
        f"{path} has layout {layout} of {writer}, and headrace {__version__} reads layout {LAYOUT}: nothing was "
        f"changed. Go on with {writer}, restore a backup that {__version__} made, or choose another run_name"
    )


def _lock_folder(folder: Path) -> Any:
    """Holds the lock until the file is closed. Raises ConfigError when another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock_file = (folder / "lock").open("w")
    if not lock(lock_file):
        raise ConfigError(f"{folder} is in use by another buffer: stop it, or choose another --data-dir")
    return lock_file


# A consistent copy of the files, beside them while it is read

_COPY_PREFIX = "copy-"


@contextmanager
def _copy_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder on the ledger's disk, and deletes it afterwards."""
    copy = folder / f"{_COPY_PREFIX}{secrets.token_hex(4)}"
    copy.mkdir()
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def _delete_copies(folder: Path) -> None:
    """Deletes copies that a killed process left behind. Only the process that owns the folder may call it."""
    for copy in folder.glob(f"{_COPY_PREFIX}*"):
        shutil.rmtree(copy)


def _files_of(copy: Path) -> Sequence[CopiedFile]:
    paths = sorted(path for path in copy.rglob("*") if path.is_file())
    return [CopiedFile(str(path.relative_to(copy)), path, path.stat().st_size) for path in paths]


# The position mark

MARK = "position"
_MARK = struct.Struct("<16sQ")
_MARK_BYTES = _MARK.size + 4


class PositionMark:
    """It is written, not synced, after each durable commit: it may be behind the ledger, never ahead."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ledger = path.with_name(FILE)
        self._descriptor: int | None = None

    def require(self, ledger_id: str | None, position: int) -> None:
        """Raises DataLoss when the mark is another ledger's or ahead of this one. A torn mark is ignored.

        `ledger_id` is None when the ledger does not know its own any more.
        """
        data = self._path.read_bytes() if self._path.exists() else b""
        if len(data) != _MARK_BYTES or data != _packed_mark(*_MARK.unpack_from(data)):
            return
        found, marked = _MARK.unpack_from(data)
        if ledger_id is not None and found.rstrip(b"\0") != ledger_id.encode():
            raise DataLoss(
                f"{self._ledger} is another ledger's than the file `position` beside it (put back the one that belongs "
                "there if you have it)"
            )
        if position < marked:
            raise DataLoss(
                f"{self._ledger} ends at position {position}, and the ledger was at {marked} at least, so the log "
                f"beside it ({FILE}-wal) was cut, changed or deleted, or an older file was put in its place (put "
                "it back if you have it)"
            )

    def write(self, ledger_id: str, position: int) -> None:
        """Notes that every event up to `position` is durable."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.pwrite(self._descriptor, _packed_mark(ledger_id.encode(), position), 0)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _packed_mark(ledger_id: bytes, position: int) -> bytes:
    body = _MARK.pack(ledger_id, position)
    return body + crc32c(body).to_bytes(4, "little")


# Errors of the disk, and of what is on it


class FullDisk:
    """Waits until a full disk has room. Several threads may wait at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._refused: dict[int, OSError] = {}
        """The error of a thread's last refused write, by thread id."""
        self._stopped = threading.Event()

    @property
    def refusal(self) -> DiskFull | None:
        """The error for callers while a thread waits, else None."""
        errors = list(self._refused.values())
        return DiskFull(str(errors[0]), retry_after_seconds=_RETRY_SECONDS) if errors else None

    def outlast(self, write: Callable[[], _Result]) -> _Result:
        """Repeats `write` until the disk has room. Raises any other OSError, and ENOSPC after `stop`.

        `write` must store everything or nothing.
        """
        thread = threading.get_ident()
        try:
            while True:
                try:
                    with _disk_errors(self._folder):
                        return write()
                except OSError as error:
                    if error.errno != errno.ENOSPC or self._stopped.is_set():
                        raise
                    if thread not in self._refused:
                        log.error("disk_full", message=str(error))
                    self._refused[thread] = error
                self._stopped.wait(_RETRY_SECONDS)
        finally:
            self._refused.pop(thread, None)

    def stop(self) -> None:
        """Makes every wait end with an error."""
        self._stopped.set()


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turns a disk's refusals into one OSError with the folder and the way out. Nothing of the write was stored."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        is_io = isinstance(error, sqlite3.OperationalError) and shutil.disk_usage(folder).free < _FEW_BYTES
        if is_io or error.sqlite_errorname == "SQLITE_FULL":
            raise _full(folder) from error
        raise OSError(
            errno.EIO, f"SQLite says {str(error)!r}, check the disk, then start the buffer again", str(folder)
        ) from error
    except OSError as error:
        if error.errno in _FULL:
            raise _full(folder) from error
        raise


def _full(folder: Path) -> OSError:
    return OSError(
        errno.ENOSPC,
        "the disk is full. Delete other files on it, and a buffer that runs goes on by itself; or stop it, move the "
        "folder to a larger disk, and start it again. Samples are deleted when their steps are committed",
        str(folder),
    )


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """Refuses to start a damaged ledger, in one sentence with the file, the problem and the way out."""
    try:
        yield
    except DataLoss as error:
        raise _refusal(folder, error.message) from error
    except sqlite3.DatabaseError as error:
        is_damage = not isinstance(error, sqlite3.OperationalError) or error.sqlite_errorcode == sqlite3.SQLITE_ERROR
        if not is_damage:
            raise
        raise _refusal(folder, f"{folder / FILE} is damaged ({error})") from error


def _refusal(folder: Path, problem: str) -> DataLoss:
    return DataLoss(
        f"{' '.join(problem.split())}: move {folder} away and restore a backup with "
        f"`headrace buffer restore BACKUP {folder}`"
    )


def _is_corrupt(error: sqlite3.DatabaseError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
