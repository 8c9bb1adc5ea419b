"""`python -m services.buffer` on small payload files, on a disk or a SQLite that fails where HEADRACE_FAILPOINT says.

With HEADRACE_COMPACTING it does nothing but compact beside its work: every file that is not written to is copied.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path

from headrace.job.schema.job import Job
from services.buffer.__main__ import main
from services.buffer.store.base import Store
from services.buffer.store.sqlite import compaction
from services.buffer.store.sqlite.store import SqliteStore
from tests.support.faults.faulty_database import DATABASE_FAILPOINTS, connect_faulty
from tests.support.faults.faulty_files import FaultyFiles

_EVERY_FILE = 1e9
_PAUSE_SECONDS = 0.002


def open_small_store(job: Job, folder: Path) -> Store:
    assert job.buffer.buffer_store == "sqlite"
    failpoint, file_bytes = os.environ.get("HEADRACE_FAILPOINT"), int(os.environ["HEADRACE_FILE_BYTES"])
    if "HEADRACE_COMPACTING" in os.environ:
        compaction._SMALL_FRACTION = _EVERY_FILE
    if failpoint is None:
        store = SqliteStore(folder, file_bytes=file_bytes)
    elif failpoint.partition(":")[0] in {point for point, _ in DATABASE_FAILPOINTS}:
        store = SqliteStore(folder, file_bytes=file_bytes, connect_writer=partial(connect_faulty, failpoint=failpoint))
    else:
        store = SqliteStore(folder, file_bytes=file_bytes, open_files=partial(FaultyFiles, failpoint=failpoint))
    if "HEADRACE_COMPACTING" in os.environ:
        threading.Thread(target=_compact, args=(store,), daemon=True).start()
    return store


def _compact(store: SqliteStore) -> None:
    pause = threading.Event()
    while not pause.wait(_PAUSE_SECONDS):
        store.compact()


if __name__ == "__main__":
    sys.exit(main(open_small_store))
