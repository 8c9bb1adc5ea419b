"""`python -m services.buffer` on a segment store whose disk fails where HEADRACE_FAILPOINT says."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from headrace.config.job import Job
from services.buffer.__main__ import main
from services.buffer.store.base import Store
from services.buffer.store.segments import SegmentStore
from tests.support.faulty_files import FaultyFiles


def open_faulty_store(job: Job, folder: Path) -> Store:
    assert job.buffer.buffer_store == "segments"
    open_files = partial(FaultyFiles, failpoint=os.environ["HEADRACE_FAILPOINT"])
    return SegmentStore(folder, segment_bytes=int(os.environ["HEADRACE_SEGMENT_BYTES"]), open_files=open_files)


if __name__ == "__main__":
    sys.exit(main(open_faulty_store))
