"""Which files may be read as prompts, and how they are opened: a pipe, a device or a file elsewhere never is.

The job names its own files as it likes. Clients name files below one folder, which the job names (--prompt-root).
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
    """`own` are the job's; None where a program opens the buffer, which vouches for what it names itself."""

    root: Path | None = None
    own: Collection[str] | None = None

    def of_client(self, path: str) -> str:
        """The file below the root that a client means, without symbolic links. Raises InvalidArgument for any other."""
        if self.root is None:
            raise InvalidArgument(
                "clients may name no prompt files here, the job has no --prompt-root: submit prompts, or start the "
                "buffer with the folder that they may name files of",
                field=_FIELD,
                reason="PROMPT_FILE_REFUSED",
            )
        root = Path(os.path.realpath(self.root))
        real = Path(os.path.realpath(root / path))
        if root not in real.parents:
            raise InvalidArgument(
                f"prompt file {shown(path)} is not below the folder of --prompt-root: clients name files in there",
                field=_FIELD,
                reason="PROMPT_FILE_REFUSED",
            )
        return str(real)

    def check(self, path: str) -> None:
        """A file that a stream was created with. Raises InvalidArgument where it may not be read any more."""
        if self.own is not None and path not in self.own:
            self.of_client(path)


def open_same(path: str | Path, inode: int) -> BinaryIO:
    """The file that it was when it was opened first. Raises InvalidArgument where another one has its name now."""
    file = open_regular(path)
    if os.fstat(file.fileno()).st_ino != inode:
        file.close()
        raise InvalidArgument(
            f"prompt file {path} was replaced since it was opened", field=_FIELD, reason="PROMPT_FILE_REFUSED"
        )
    return file


def open_regular(path: str | Path) -> BinaryIO:
    """The file, for reading. Raises OSError where there is none, InvalidArgument where it is not a regular file."""
    # O_NONBLOCK: a pipe would keep us until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArgument(f"prompt file {path} is not a regular file", field=_FIELD, reason="PROMPT_FILE_REFUSED")
    return os.fdopen(descriptor, "rb")
