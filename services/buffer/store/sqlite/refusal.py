"""Why a damaged ledger does not start: one sentence with the file, what is wrong in it, and the way out."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import DataLoss
from services.buffer.store.sqlite.database import FILE


@contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Around a start. What the disk does not let SQLite do is no damage, and is raised as it is."""
    try:
        yield
    except DataLoss as error:
        raise refusal(folder, error.message) from error
    except sqlite3.DatabaseError as error:
        if not _is_damage(error):
            raise
        raise refusal(folder, f"{folder / FILE} is damaged ({error})") from error


def refusal(folder: Path, problem: str) -> DataLoss:
    """To be raised: what is wrong, and the way out."""
    return DataLoss(
        f"{' '.join(problem.split())}: move {folder} away and restore a backup with "
        f"`headrace buffer restore BACKUP {folder}`"
    )


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """A statement that does not fit the tables says that their schema is not what was written."""
    return not isinstance(error, sqlite3.OperationalError) or error.sqlite_errorcode == sqlite3.SQLITE_ERROR
