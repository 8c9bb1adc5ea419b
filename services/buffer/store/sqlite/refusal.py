"""Refuses to start a damaged ledger, in one sentence with the file, what is wrong in it, and the way out."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import DataLoss
from services.buffer.store.sqlite.database import FILE


@contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Wraps a start. Errors of the disk are not damage, and pass through."""
    try:
        yield
    except DataLoss as error:
        raise refusal(folder, error.message) from error
    except sqlite3.DatabaseError as error:
        if not _is_damage(error):
            raise
        raise refusal(folder, f"{folder / FILE} is damaged ({error})") from error


def refusal(folder: Path, problem: str) -> DataLoss:
    """Returns the error, with what is wrong and the way out."""
    return DataLoss(
        f"{' '.join(problem.split())}: move {folder} away and restore a backup with "
        f"`headrace buffer restore BACKUP {folder}`"
    )


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """True, too, for a statement that does not fit the tables: their schema is not what was written."""
    return not isinstance(error, sqlite3.OperationalError) or error.sqlite_errorcode == sqlite3.SQLITE_ERROR
