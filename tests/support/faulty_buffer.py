"""`python -m services.buffer` on a disk, or a SQLite, that fails where HEADRACE_FAILPOINT says."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from headrace.config.job import Job
from services.buffer.__main__ import main
from services.buffer.store.base import Store
from services.buffer.store.sqlite.store import SqliteStore
from tests.support.faulty_database import DATABASE_FAILPOINTS, connect_faulty
from tests.support.faulty_files import FaultyFiles


def open_faulty_store(job: Job, folder: Path) -> Store:
    assert job.buffer.buffer_store == "sqlite"
    failpoint, file_bytes = os.environ["HEADRACE_FAILPOINT"], int(os.environ["HEADRACE_FILE_BYTES"])
    if failpoint.partition(":")[0] in {point for point, _ in DATABASE_FAILPOINTS}:
        return SqliteStore(folder, file_bytes=file_bytes, connect_writer=partial(connect_faulty, failpoint=failpoint))
    return SqliteStore(folder, file_bytes=file_bytes, open_files=partial(FaultyFiles, failpoint=failpoint))


if __name__ == "__main__":
    sys.exit(main(open_faulty_store))
