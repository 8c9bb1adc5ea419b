"""A checkpoint's manifest: written last, so a folder that has a true one is whole. Plain JSON, with a checksum."""

from __future__ import annotations

import json
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from headrace.errors import DataLoss, FailedPrecondition
from services.trainer.checkpoint.shard_chunk import Place
from services.trainer.files.durable import write_file

FORMAT = 2
"""1 did not say what the whole tensors are, so a larger model's checkpoint could be taken for a smaller one's."""

MAX_MANIFEST_BYTES = 1 << 30
_NAME = "manifest.json"
_PACKAGES = ("headrace", "torch", "megatron-core")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file's entry in the manifest, by which damage is found."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint's content."""

    step: int
    policy_version: int
    ledger_epoch: int
    layout: str
    versions: Mapping[str, str]
    scalars: Mapping[str, Any]
    """The parts' numbers, e.g. the schedule's place, and the model's facts."""
    files: Mapping[str, FileFacts]
    places: Sequence[Place]

    def write(self, folder: Path) -> None:
        """Returns when the manifest is on the disk; the files that it names were put there before."""
        body = asdict(self)
        write_file(folder / _NAME, json.dumps({"format": FORMAT, "crc32": _crc32_of(body), "manifest": body}))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises DataLoss unless the folder holds a true manifest and all its files at their full size.

        Raises FailedPrecondition for a manifest that an older headrace wrote.
        """
        try:
            manifest = cls._parsed(folder)
            manifest._require_files(folder)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataLoss(f"{folder} has no readable {_NAME}: {str(error)[:500]}") from error
        return manifest

    def verify(self, folder: Path, name: str) -> None:
        """Raises DataLoss unless the file's bytes are those that were written."""
        try:
            found = crc32(folder / name)
        except OSError as error:
            raise DataLoss(f"{folder}/{name} cannot be read: {error}") from error
        if found != self.files[name].crc32:
            raise DataLoss(f"{folder}/{name} is not what was written: crc32 {found}, not {self.files[name].crc32}")

    @classmethod
    def _parsed(cls, folder: Path) -> Manifest:
        path = folder / _NAME
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_MANIFEST_BYTES:
            raise DataLoss(f"{path} is not a file of at most {MAX_MANIFEST_BYTES} bytes")
        found = json.loads(path.read_bytes())
        if _crc32_of(found["manifest"]) != found["crc32"]:
            raise DataLoss(f"{path} is not what was written: its checksum differs")
        if found.get("format") != FORMAT:
            raise FailedPrecondition(
                f"{folder} is a checkpoint of format {found.get('format', 1)}, and this headrace reads {FORMAT}: "
                f"resume it with headrace {found['manifest']['versions']['headrace']}, or export it there and start "
                "from the exported folder"
            )
        return _ADAPTER.validate_python(found["manifest"])

    def _require_files(self, folder: Path) -> None:
        sizes = {path.name: path.lstat().st_size for path in folder.iterdir() if path.is_file()}
        broken = sorted(name for name, facts in self.files.items() if sizes.get(name) != facts.num_bytes)
        if broken:
            raise DataLoss(f"{folder} lacks {', '.join(broken)} in full: copy it again, or use another checkpoint")
        if unknown := {place.file for place in self.places} - self.files.keys():
            raise DataLoss(f"{folder}/{_NAME} names files that it does not list: {', '.join(sorted(unknown))}")


_ADAPTER = TypeAdapter(Manifest)


def versions() -> dict[str, str]:
    """The versions of the packages that had a part in a checkpoint, by name."""
    return {package: version(package) for package in _PACKAGES}


def crc32(path: Path) -> int:
    """The CRC-32 of a file's bytes."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _crc32_of(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
