"""Safetensors files with the permissions of the run's other files."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes the file with the mode that the umask gives; it is not synced.

    safetensors writes a draft of its own, which only its owner can read, and gives it the name.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), str(path), metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)
