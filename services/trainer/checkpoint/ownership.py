"""A checkpoint folder belongs to one run, and takes the checkpoints of its newest epoch only.

.owner.json  the run and its newest epoch; replaced when a trainer with a newer epoch, or another run, takes the folder
.alive       locked by the owner's rank 0 as long as it lives: another run is refused, not mixed in
.lock        locked while the owner is looked at and a checkpoint takes its place
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from headrace.disk import NoLocks, lock
from headrace.errors import FailedPrecondition, Fenced
from headrace.rpc.log import log
from services.trainer.files.durable import make_folder, write_file

_LOCK_SECONDS = 60.0


class FolderOwner:
    """The trainer of `run` as an owner of `folder`. Used on rank 0 alone."""

    def __init__(self, folder: Path, run: Path) -> None:
        self._folder = folder
        self._run = str(run.absolute())
        self._alive: BinaryIO | None = None

    @contextmanager
    def claimed(self, epoch: int) -> Iterator[None]:
        """The folder is this trainer's, and nobody else's checkpoint takes its place inside the block.

        Raises Fenced when a newer trainer of the run has it, FailedPrecondition when another run's that lives has it.
        """
        make_folder(self._folder)
        with (self._folder / ".lock").open("wb") as file:
            self._wait_for(file)
            self._take(epoch)
            yield

    def _take(self, epoch: int) -> None:
        owner = self._owner()
        is_ours = owner.get("run", self._run) == self._run
        if is_ours and owner.get("epoch", 0) > epoch:
            raise Fenced(
                f"{self._folder} takes checkpoints of epoch {owner['epoch']}, and this trainer has epoch {epoch}: "
                "a newer trainer has taken over: end this one"
            )
        if self._alive is None:
            self._alive = _locked(self._folder / ".alive")
        if self._alive is None and not is_ours:
            raise FailedPrecondition(
                f"{self._folder} belongs to run {owner['run']}, whose trainer is running (process {owner.get('pid')} "
                f"on {owner.get('host')}): end it, or pass another --save"
            )
        mine = {"run": self._run, "epoch": epoch, "host": socket.gethostname(), "pid": os.getpid()}
        if owner != mine:
            write_file(self._folder / ".owner.json", json.dumps(mine))

    def _owner(self) -> dict[str, Any]:
        """{} when nobody has taken the folder yet, or the file says nothing that can be read."""
        path = self._folder / ".owner.json"
        try:
            found = json.loads(path.read_text())
            return {"run": str(found["run"]), "epoch": int(found["epoch"]), "host": found["host"], "pid": found["pid"]}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("owner_unreadable", file=str(path), error=str(error))
            return {}

    def _wait_for(self, file: BinaryIO) -> None:
        if not _lock(file, _LOCK_SECONDS):
            raise FailedPrecondition(
                f"another trainer ({self._owner()}) has held {file.name} for {_LOCK_SECONDS:.0f} s: end it"
            )


def _locked(path: Path) -> BinaryIO | None:
    """The file, locked until it is closed or the process ends; None when somebody else has it."""
    file = path.open("wb")
    if _lock(file):
        return file
    file.close()
    return None


def _lock(file: BinaryIO, wait_seconds: float = 0.0) -> bool:
    try:
        return lock(file, wait_seconds)
    except NoLocks as error:
        log.warning("no_locks", file=file.name, error=str(error))  # epochs fence the trainers of one run all the same
        return True
