"""Decides which files may be read as prompts and opens them; pipes, devices and files elsewhere are never opened.

The job may name any file. Clients may name files below one folder, which the job sets (--prompt-root).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headrace.errors import InvalidArgument
from headrace.wire.checks import shown

_FIELD = "config.files.path"


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """`own` are the job's files; None allows every file, for a program that opens the buffer itself."""

    root: Path | None = None
    own: Collection[str] | None = None

    def of_client(self, path: str) -> str:
        """Resolves symbolic links. Raises InvalidArgument for a file outside of the root."""
        if self.root is None:
            raise InvalidArgument(
                "clients may not name prompt files, as the job has no --prompt-root: submit prompts, or start the "
                "buffer with the folder of the files that they may name",
                field=_FIELD,
                reason="PROMPT_FILE_REFUSED",
            )
        root = Path(os.path.realpath(self.root))
        real = Path(os.path.realpath(root / path))
        if root not in real.parents:
            raise InvalidArgument(
                f"prompt file {shown(path)} is not below the folder of --prompt-root: name a file in there",
                field=_FIELD,
                reason="PROMPT_FILE_REFUSED",
            )
        return str(real)

    def check(self, path: str) -> None:
        """Raises InvalidArgument when a stream's file may not be read any more."""
        if self.own is not None and path not in self.own:
            self.of_client(path)


def open_same(path: str | Path, inode: int) -> BinaryIO:
    """Raises InvalidArgument when another file has the name now."""
    file = open_regular(path)
    if os.fstat(file.fileno()).st_ino != inode:
        file.close()
        raise InvalidArgument(
            f"prompt file {path} was replaced since it was opened", field=_FIELD, reason="PROMPT_FILE_REFUSED"
        )
    return file


def open_regular(path: str | Path) -> BinaryIO:
    """Raises OSError when the file does not exist, InvalidArgument when it is not a regular file."""
    # O_NONBLOCK: a pipe would keep us until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArgument(f"prompt file {path} is not a regular file", field=_FIELD, reason="PROMPT_FILE_REFUSED")
    return os.fdopen(descriptor, "rb")
