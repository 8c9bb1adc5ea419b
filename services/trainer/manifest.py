"""A checkpoint's manifest: written last, so a folder that has a true one is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from headrace.errors import DataLoss

_NAME = "manifest.json"
_PACKAGES = ("headrace", "torch", "megatron-core")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds. `files` maps every file's name to its size in bytes."""

    step: int
    policy_version: int
    ledger_epoch: int
    layout: str
    versions: Mapping[str, str]
    files: Mapping[str, int]

    @classmethod
    def of_folder(cls, folder: Path, *, step: int, policy_version: int, ledger_epoch: int, layout: str) -> Manifest:
        """For the files that are in the folder now."""
        return cls(
            step=step,
            policy_version=policy_version,
            ledger_epoch=ledger_epoch,
            layout=layout,
            versions={package: version(package) for package in _PACKAGES},
            files=sizes(folder),
        )

    def write(self, folder: Path) -> None:
        """Returns when the manifest is on the disk, and every file that it names before it."""
        for name in self.files:
            _sync(folder / name)
        draft = folder / f".{_NAME}"
        draft.write_text(json.dumps(asdict(self), indent=2))
        _sync(draft)
        draft.rename(folder / _NAME)
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises DataLoss unless the folder holds a manifest and all its files at their full size."""
        try:
            manifest = cls(**json.loads((folder / _NAME).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DataLoss(f"{folder} has no readable {_NAME}: {error}") from error
        found = sizes(folder)
        broken = sorted(name for name, size in manifest.files.items() if found.get(name) != size)
        if broken:
            raise DataLoss(f"{folder} lacks {', '.join(broken)} in full: it was copied or written in part")
        return manifest


def sizes(folder: Path) -> dict[str, int]:
    """Files of a checkpoint, by name; the manifest is not among them."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if not path.name.endswith(_NAME)}


def sync_folder(folder: Path) -> None:
    """Names in the folder survive a power loss from here on."""
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
