"""`position`: how far the ledger has come at least, for SQLite takes a log that was cut for one that ended there.

Written, not synced, after a commit is durable: it may be behind the ledger, and never before it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from crc32c import crc32c

_LAYOUT = struct.Struct("<16sQ")
_CHECKSUM = struct.Struct("<I")


class PositionMark:
    """Of one ledger; another ledger's says nothing here."""

    def __init__(self, path: Path, ledger_id: str) -> None:
        self._ledger_id = ledger_id.encode()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def read(self) -> int | None:
        """None when it is not there, not whole, or another ledger's."""
        data = os.pread(self._descriptor, _LAYOUT.size + _CHECKSUM.size, 0)
        if len(data) != _LAYOUT.size + _CHECKSUM.size or data != self._packed(_LAYOUT.unpack_from(data)[1]):
            return None
        position: int = _LAYOUT.unpack_from(data)[1]
        return position

    def write(self, position: int) -> None:
        """Every event up to there is durable."""
        os.pwrite(self._descriptor, self._packed(position), 0)

    def close(self) -> None:
        """No call comes after it."""
        os.close(self._descriptor)

    def _packed(self, position: int) -> bytes:
        body = _LAYOUT.pack(self._ledger_id, position)
        return body + _CHECKSUM.pack(crc32c(body))
