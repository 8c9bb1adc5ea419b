"""The folders to which a running trainer may be asked to export its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import InvalidArgument
from headrace.wire.checks import shown


class ExportFolders:
    """Folders below `root`, but not below those that the run keeps for itself. Its methods touch the disk."""

    def __init__(self, root: Path, reserved: Sequence[Path]) -> None:
        self._root = root
        self._reserved = reserved

    def locate(self, text: str) -> Path:
        """The folder that a client names, without symlinks. Raises InvalidArgument unless the operator allows it."""
        if not Path(text).is_absolute():
            raise _refused(f"path {shown(text)} is not absolute on the trainer's machine")
        with _disk_errors(shown(text)):
            folder, root = Path(text).resolve(), self._root.resolve()
            self._require_allowed(folder, root)
            nearest = next(each for each in (folder, *folder.parents) if each.exists())
            if not nearest.is_dir():
                raise _refused(f"{nearest} is not a folder: name a new folder")
            return folder

    def require_new(self, folder: Path) -> None:
        """Raises InvalidArgument unless it is absent or empty."""
        with _disk_errors(str(folder)):
            if folder.exists() and any(folder.iterdir()):
                raise _refused(f"{folder} is not empty: name a new folder")

    def _require_allowed(self, folder: Path, root: Path) -> None:
        if root not in folder.parents:
            raise _refused(f"{folder} is not below {root}: name a folder there, or start the run with --export-root")
        for taken in self._reserved:
            if folder.is_relative_to(taken.resolve()):
                raise _refused(f"{folder} is in {taken}, which the run keeps for itself: name another folder")


@contextmanager
def _disk_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for a loop of symlinks
        raise _refused(f"{path} cannot be read: {error}") from error


def _refused(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="path")
