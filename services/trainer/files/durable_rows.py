"""Rows of JSON, one a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from services.trainer.files.durable import sync


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]], *, synced: bool = True) -> None:
    """Durable when it returns, if `synced`; nothing of it is there when it raises. A line that a kill cut stays one."""
    is_new = not path.exists()
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            lines = [json.dumps(row).encode() + b"\n" for row in rows]
            _write(file, b"".join([b"" if _ends_a_line(file) else b"\n", *lines]))
            if synced:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
    if is_new and synced:
        sync(path.parent)


def _write(file: FileIO, data: bytes) -> None:
    """A disk that fills up takes a part, and refuses the rest."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _ends_a_line(file: FileIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
