"""`python -m services.buffer` on a segment store whose disk, or whose index, fails where HEADRACE_FAILPOINT says."""

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
from tests.support.faulty_index import FaultyIndex


def open_faulty_store(job: Job, folder: Path) -> Store:
    assert job.buffer.buffer_store == "segments"
    failpoint, segment_bytes = os.environ["HEADRACE_FAILPOINT"], int(os.environ["HEADRACE_SEGMENT_BYTES"])
    if failpoint.startswith("index"):
        return SegmentStore(folder, segment_bytes=segment_bytes, index_at=partial(FaultyIndex, failpoint=failpoint))
    return SegmentStore(folder, segment_bytes=segment_bytes, open_files=partial(FaultyFiles, failpoint=failpoint))


if __name__ == "__main__":
    sys.exit(main(open_faulty_store))
