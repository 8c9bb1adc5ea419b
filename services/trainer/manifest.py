"""A checkpoint's manifest: written last, so a folder that has a true one is whole. Plain JSON, with a checksum."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.errors import DataLoss
from services.trainer.piece import Place

_NAME = "manifest.json"
_PACKAGES = ("headrace", "torch", "megatron-core")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Of one file of a checkpoint."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    policy_version: int
    ledger_epoch: int
    layout: str
    versions: Mapping[str, str]
    scalars: Mapping[str, Any]
    """The parts' numbers, e.g. the schedule's place."""
    files: Mapping[str, FileFacts]
    places: Sequence[Place]

    def write(self, folder: Path) -> None:
        """Returns when the manifest is on the disk; the files that it names were put there before."""
        body = asdict(self)
        draft = folder / f".{_NAME}"
        draft.write_text(json.dumps({"crc32": _crc32_of(body), "manifest": body}))
        sync(draft)
        draft.rename(folder / _NAME)
        sync(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises DataLoss unless the folder holds a true manifest and all its files at their full size."""
        try:
            found = json.loads((folder / _NAME).read_text())
            body = found["manifest"]
            if _crc32_of(body) != found["crc32"]:
                raise DataLoss(f"{folder}/{_NAME} is not what was written: its checksum differs")
            files = {name: FileFacts(**facts) for name, facts in body.pop("files").items()}
            places = [Place(**place | {"shape": tuple(place["shape"])}) for place in body.pop("places")]
            manifest = cls(**body, files=files, places=places)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataLoss(f"{folder} has no readable {_NAME}: {error}") from error
        manifest._require_sizes(folder)
        return manifest

    def verify(self, folder: Path, name: str) -> None:
        """Raises DataLoss unless the file's bytes are those that were written."""
        if (found := crc32(folder / name)) != self.files[name].crc32:
            raise DataLoss(f"{folder}/{name} is not what was written: crc32 {found}, not {self.files[name].crc32}")

    def _require_sizes(self, folder: Path) -> None:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        broken = sorted(name for name, facts in self.files.items() if sizes.get(name) != facts.num_bytes)
        if broken:
            raise DataLoss(f"{folder} lacks {', '.join(broken)} in full: it was copied or written in part")


def versions() -> dict[str, str]:
    """Of the packages that had a part in a checkpoint."""
    return {package: version(package) for package in _PACKAGES}


def crc32(path: Path) -> int:
    """Of a file's bytes."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder, survive a power loss from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _crc32_of(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
