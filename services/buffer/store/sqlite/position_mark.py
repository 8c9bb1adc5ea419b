"""The file `position` says how far the ledger has come at least, as SQLite does not notice that its log was cut.

It is written, not synced, after each durable commit: it may be behind the ledger, never ahead.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from crc32c import crc32c

from headrace.errors import DataLoss
from services.buffer.store.sqlite.database import FILE

_LAYOUT = struct.Struct("<16sQ")
_CHECKSUM = struct.Struct("<I")
_NUM_BYTES = _LAYOUT.size + _CHECKSUM.size


class PositionMark:
    def __init__(self, path: Path) -> None:
        self._ledger = path.with_name(FILE)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def require(self, ledger_id: str | None, position: int) -> None:
        """Raises DataLoss when the mark is another ledger's or ahead of this one. A torn mark is ignored.

        `ledger_id` is None when the ledger does not know its own any more.
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
                f"beside it ({FILE}-wal) was cut, changed or deleted, or an older file was put in its place (put "
                "it back if you have it)"
            )

    def write(self, ledger_id: str, position: int) -> None:
        """Notes that every event up to `position` is durable."""
        os.pwrite(self._descriptor, _packed(ledger_id.encode(), position), 0)

    def close(self) -> None:
        """Ends it: no other method may be called afterwards."""
        os.close(self._descriptor)


def _packed(ledger_id: bytes, position: int) -> bytes:
    body = _LAYOUT.pack(ledger_id, position)
    return body + _CHECKSUM.pack(crc32c(body))
