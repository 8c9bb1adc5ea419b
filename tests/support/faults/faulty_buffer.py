"""`python -m services.buffer` that writes a file for small calls, too, on a disk or a SQLite that fails on request.

HEADRACE_FAILPOINT says where it fails, HEADRACE_LARGE_CALL_BYTES which calls get a file.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from headrace.job.schema.job import Job
from services.buffer.__main__ import main
from services.buffer.store.base import Store
from services.buffer.store.sqlite import SqliteStore
from tests.support.faults.faulty_database import DATABASE_FAILPOINTS, connect_faulty
from tests.support.faults.faulty_files import FaultyFiles


def open_small_store(job: Job, folder: Path) -> Store:
    assert job.buffer.buffer_store == "sqlite"
    failpoint, large_call_bytes = os.environ.get("HEADRACE_FAILPOINT"), int(os.environ["HEADRACE_LARGE_CALL_BYTES"])
    if failpoint is None:
        return SqliteStore(folder, large_call_bytes=large_call_bytes)
    if failpoint.partition(":")[0] in {point for point, _ in DATABASE_FAILPOINTS}:
        connect = partial(connect_faulty, failpoint=failpoint)
        return SqliteStore(folder, large_call_bytes=large_call_bytes, connect_writer=connect)
    return SqliteStore(folder, large_call_bytes=large_call_bytes, open_files=partial(FaultyFiles, failpoint=failpoint))


if __name__ == "__main__":
    sys.exit(main(open_small_store))
