"""`position`: how far the ledger has come at least, for SQLite takes a log that was cut for one that ended there.

Written, not synced, after a commit is durable: it may be behind the ledger, and never before it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from crc32c import crc32c

from headrace.errors import DataLoss

_LAYOUT = struct.Struct("<16sQ")
_CHECKSUM = struct.Struct("<I")
_NUM_BYTES = _LAYOUT.size + _CHECKSUM.size


class PositionMark:
    """One small file."""

    def __init__(self, path: Path) -> None:
        self._ledger = path.with_name("ledger.sqlite")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def require(self, ledger_id: str | None, position: int) -> None:
        """Raises DataLoss when it is another ledger's, or its ledger was further. One that is not whole tells nothing.

        `ledger_id`: None where the ledger does not know its own any more.
        """
        data = os.pread(self._descriptor, _NUM_BYTES, 0)
        if len(data) != _NUM_BYTES or data != _packed(*_LAYOUT.unpack_from(data)):
            return
        found, marked = _LAYOUT.unpack_from(data)
        if ledger_id is not None and found.rstrip(b"\0") != ledger_id.encode():
            raise DataLoss(
                f"{self._ledger} is another ledger's than the file `position` beside it (put back the one that belongs "
                "there if you have it)"
            )
        if position < marked:
            raise DataLoss(
                f"{self._ledger} ends at position {position}, and the ledger was at {marked} at least, so the log "
                "beside it (ledger.sqlite-wal) was cut, changed or deleted, or an older file was put in its place (put "
                "it back if you have it)"
            )

    def write(self, ledger_id: str, position: int) -> None:
        """Every event up to there is durable."""
        os.pwrite(self._descriptor, _packed(ledger_id.encode(), position), 0)

    def close(self) -> None:
        """No call comes after it."""
        os.close(self._descriptor)


def _packed(ledger_id: bytes, position: int) -> bytes:
    body = _LAYOUT.pack(ledger_id, position)
    return body + _CHECKSUM.pack(crc32c(body))
