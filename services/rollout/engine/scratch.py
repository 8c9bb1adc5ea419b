"""What an engine and the libraries below it keep in the temporary folder: where its ranks meet, and its sockets.

Each engine has a folder of its own there, because the path of a socket must be short; a link in the log folder names
it. The folder goes when the engine ends. What a service that was killed has left goes when the next one starts.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path

_PREFIX = "headrace-engine-"
_LINKS = ".engine-*.tmp"


class Scratch:
    """One engine's folder, readable by this user alone."""

    def __init__(self, log_dir: Path, engine: int) -> None:
        self._link = log_dir / _LINKS.replace("*", str(engine))
        self.folder = Path(tempfile.gettempdir()) / f"{_PREFIX}{uuid.uuid4().hex[:16]}"

    def make(self) -> None:
        """The link first: no kill comes between a folder and its name."""
        _delete(self._link)
        self._link.parent.mkdir(parents=True, exist_ok=True)
        self._link.symlink_to(self.folder)
        self.folder.mkdir(mode=0o700)

    def delete(self) -> None:
        """Idempotent."""
        if self._link.is_symlink() and self._link.readlink() == self.folder:
            _delete(self._link)


def delete_leftovers(log_dir: Path) -> None:
    """Of services that had this log folder and were killed."""
    for link in log_dir.glob(_LINKS):
        _delete(link)


def _delete(link: Path) -> None:
    if link.is_symlink():
        folder = link.readlink()
        if folder.name.startswith(_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)  # a process that is being killed may still write there
        link.unlink(missing_ok=True)
