"""Folders in the temporary folder that do not outlive their service: not even by a kill.

A link in a folder of the service's own names each of them. The folder goes when its work ends; what a service that was
killed has left goes when the next one with the same folder of links starts.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path

_PREFIX = "headrace-"


class Scratch:
    """One folder, readable by this user alone; its path is short enough for a socket in it."""

    def __init__(self, links: Path, name: str) -> None:
        self._link = links / _link_name(name)
        self.folder = Path(tempfile.gettempdir()) / f"{_PREFIX}{name}-{uuid.uuid4().hex[:16]}"

    def make(self) -> None:
        """Creates the link first, so that a kill never leaves a folder without its link."""
        _delete(self._link)
        self._link.parent.mkdir(parents=True, exist_ok=True)
        self._link.symlink_to(self.folder)
        self.folder.mkdir(mode=0o700)

    def delete(self) -> None:
        """Deletes the folder and the link; repeats do nothing."""
        if self._link.is_symlink() and self._link.readlink() == self.folder:
            _delete(self._link)


def delete_leftovers(links: Path, names: str) -> None:
    """Deletes what killed services left with links in this folder; only their successor may call it.

    `names` is a pattern.
    """
    for link in links.glob(_link_name(names)):
        _delete(link)


def _link_name(name: str) -> str:
    return f".{name}.tmp"


def _delete(link: Path) -> None:
    if link.is_symlink():
        folder = link.readlink()
        if folder.name.startswith(_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)  # a process that is being killed may still write there
        link.unlink(missing_ok=True)
