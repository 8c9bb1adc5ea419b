"""Waits out a disk that is full: what a step needs on the disk is written again until there is space."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from headrace.disk.whole_file import FULL_DISK
from headrace.errors import DiskFull
from headrace.rpc.log import log

PATIENCE_SECONDS = 300.0
_AGAIN_SECONDS = 0.5


async def outlast(write: Callable[[], None], file: Path, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Repeats `write`, off the loop. Raises DiskFull when the disk stays full, and any other OSError at once.

    `write` must leave nothing behind when it fails.
    """
    end = time.monotonic() + patience_seconds
    said = False
    while True:
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            full = DiskFull(
                f"the disk is full: {file}: {error.strerror}. Delete other files on it, and the training goes on by "
                "itself; or stop the run, move its folder to a larger disk, and repeat the command"
            )
            if time.monotonic() > end:
                raise full from error
            if not said:
                log.error("disk_full", message=full.message)
                said = True
            await asyncio.sleep(_AGAIN_SECONDS)
        else:
            if said:
                log.warning("disk_has_space", file=str(file))
            return
