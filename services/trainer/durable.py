"""Files, folders and rows of JSON that survive a power loss, and the wait for space on a full disk."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from headrace.disk import FULL_DISK, sync
from headrace.errors import AlreadyExists, DiskFull
from headrace.rpc.log import log
from headrace.rpc.retry import retry_until


def make_folder(folder: Path) -> None:
    """Makes the folder and its parents; the names of new ones are on the disk when it returns."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync(each.parent)


def sync_files(folder: Path) -> None:
    """Every file in the folder, then their names."""
    for path in sorted(folder.iterdir()):
        sync(path)
    sync(folder)


def put_in_place(draft: Path, target: Path) -> None:
    """Gives a durable draft its name, durably."""
    draft.rename(target)
    sync(target.parent)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A draft that becomes `folder` when the block ends, with every file in it on the disk; a failure leaves nothing.

    Raises AlreadyExists for a folder that has something in it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExists(f"{folder} exists already and is not empty: name another folder")
    draft = folder.parent / f".{folder.name}.draft"
    remove(draft)
    make_folder(draft)
    with ExitStack() as on_failure:
        on_failure.callback(remove, draft)
        yield draft
        for path in (*sorted(draft.rglob("*"), reverse=True), draft):
            sync(path)
        if folder.exists():
            folder.rmdir()
        put_in_place(draft, folder)
        on_failure.pop_all()


def remove(path: Path) -> None:
    """A folder with everything in it. A symlink, and what cannot be removed, stays: with a warning and no error."""
    if path.is_symlink():
        log.warning("folder_kept", folder=str(path), why="it is a symlink: remove it yourself, or what it points to")
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("folder_kept", folder=str(path), why=str(error))


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


PATIENCE_SECONDS = 300.0


async def retry_while_full(
    write: Callable[[], None], file: Path, *, patience_seconds: float = PATIENCE_SECONDS
) -> None:
    """Repeats `write`, off the loop. Raises DiskFull when the disk stays full, and any other OSError at once.

    `write` must leave nothing behind when it fails.
    """
    errors: list[DiskFull] = []

    async def attempt(seconds_left: float) -> None:
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            errors.append(
                DiskFull(
                    f"the disk is full: {file}: {error.strerror}. Delete other files on it, and the training goes on "
                    "by itself; or stop the run, move its folder to a larger disk, and repeat the command"
                )
            )
            if len(errors) == 1 and seconds_left > 0:
                log.error("disk_full", message=errors[0].message)
            raise errors[0] from error

    await retry_until(time.monotonic() + patience_seconds, attempt)
    if errors:
        log.warning("disk_has_space", file=str(file))
