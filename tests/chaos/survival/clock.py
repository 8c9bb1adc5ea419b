"""The environment in which a file moves the wall clock of every program, and the monotonic one goes on as it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_LIBRARY = Path("/usr/lib")


def library() -> Path | None:
    """Libfaketime (Debian's package faketime); None where the machine has none."""
    return next(iter(sorted(_LIBRARY.glob("*/faketime/libfaketimeMT.so.1"))), None)


def clock_environment(offset: Path) -> Mapping[str, str]:
    """`offset` is made, with a jump of 0 s in it. Times of files are left as they are, as a real jump leaves them."""
    found = library()
    if found is None:
        raise RuntimeError("there is no libfaketime here: apt-get install faketime")
    offset.write_text("+0\n")
    return {
        "LD_PRELOAD": str(found),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
