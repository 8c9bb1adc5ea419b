"""Files and folders that survive a power loss, and folders that go without taking anything else along."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from headrace.rpc.log import log


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder, survive a power loss from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Makes the folder and its parents; the names of new ones are on the disk when it returns."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync(each.parent)


def write_file(path: Path, text: str) -> None:
    """Takes the place of an older file at once; durable when it returns."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    sync(draft)
    put_in_place(draft, path)


def sync_files(folder: Path) -> None:
    """Every file in the folder, then their names."""
    for path in sorted(folder.iterdir()):
        sync(path)
    sync(folder)


def put_in_place(draft: Path, target: Path) -> None:
    """Gives a durable draft its name, durably."""
    draft.rename(target)
    sync(target.parent)


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
