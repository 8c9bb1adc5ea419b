"""A ledger's copy in a folder: its files below files/, and backup.json that says what they must be.

A backup is whole once backup.json is there; it is written last. `restore` checks every byte against it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import AsyncIterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter, ValidationError

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.disk import atomic_write, durable_write
from headrace.errors import AlreadyExists, DataLoss, NotFound

_MANIFEST = "backup.json"
_FILES = "files"


@dataclass(frozen=True, slots=True)
class BackupFile:
    """Path below the ledger's folder, length, SHA-256 in hex."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Backup:
    """A copy with everything up to `position`, perhaps more."""

    store: str
    position: int
    files: Sequence[BackupFile]

    @property
    def num_bytes(self) -> int:
        """The size of all files together."""
        return sum(file.num_bytes for file in self.files)


_MANIFEST_FORM = TypeAdapter(Backup)


async def write_backup(parts: AsyncIterable[pb.BackupResponse], folder: Path) -> Backup:
    """Writes to a new folder. Raises DataLoss when the received bytes differ from those that were sent."""
    require_new(folder)
    summary = pb.BackupSummary()
    async for part in parts:
        if part.HasField("summary"):
            summary = part.summary
        else:
            _write(folder / _FILES, part.chunk)
    for file in summary.files:
        if not file.num_bytes:
            _write(folder / _FILES, pb.BackupChunk(file=file.name))
    if not summary.store:
        raise DataLoss(f"the copy ended before its summary: delete {folder} and begin again")
    backup = Backup(
        summary.store, summary.position, [BackupFile(f.name, f.num_bytes, f.sha256.hex()) for f in summary.files]
    )
    _check(backup, folder / _FILES)
    with atomic_write(folder / _MANIFEST) as draft:
        draft.write_text(json.dumps(asdict(backup), indent=2) + "\n")
    return backup


def read_backup(folder: Path) -> Backup:
    """Raises NotFound for a folder without a whole backup, DataLoss for one whose manifest is damaged."""
    manifest = folder / _MANIFEST
    if not manifest.is_file():
        raise NotFound(f"{folder} has no {_MANIFEST}: it is no backup, or one that was cut short")
    try:
        return _MANIFEST_FORM.validate_json(manifest.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:160]
        raise DataLoss(
            f"{manifest} is not as `headrace buffer backup` wrote it: {where or 'it'}: {first['msg'][:160]}: use "
            "another backup"
        ) from error


def restore_backup(folder: Path, ledger: Path) -> Backup:
    """Copies a backup to a ledger's folder that is not there yet or empty. Raises DataLoss for changed bytes.

    What a killed restore leaves has no database, whose name comes first in a backup: no buffer takes it for a ledger.
    """
    backup = read_backup(folder)
    require_new(ledger)
    _check(backup, folder / _FILES)
    for file in reversed(backup.files):
        target = _inside(ledger, file.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with durable_write(target) as draft:
            shutil.copyfile(_inside(folder / _FILES, file.name), draft)
    return backup


def require_new(folder: Path) -> None:
    """Raises AlreadyExists for a folder with something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExists(f"{folder} is not empty: name a new folder")


def _write(folder: Path, chunk: pb.BackupChunk) -> None:
    path = _inside(folder, chunk.file)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("ab") as file:
            if file.tell() != chunk.offset:
                raise DataLoss(
                    f"{chunk.file} continues at byte {chunk.offset}, but {file.tell()} bytes arrived: start again"
                )
            file.write(chunk.data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a write's own error names no file


def _inside(folder: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute():
        raise DataLoss(f"the backup names a file {name!r} outside of its folder: headrace did not write it")
    return folder.joinpath(*parts)


def _check(backup: Backup, folder: Path) -> None:
    for file in backup.files:
        path = _inside(folder, file.name)
        with path.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
        if found != file.sha256 or path.stat().st_size != file.num_bytes:
            raise DataLoss(f"{path} is not what was backed up: its SHA-256 is {found[:16]}…, not {file.sha256[:16]}…")
