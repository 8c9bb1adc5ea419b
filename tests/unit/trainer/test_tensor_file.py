"""A safetensors file has the mode of any other file: an engine of another user reads the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.collective_io import write_tensors
from tests.support.modes import umask


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_tensors_are_readable_by_whom_the_umask_lets(tmp_path: Path, mask: int) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "config.json"
    with umask(mask):
        write_tensors(path, {"a": torch.arange(3)}, {"format": "pt"})
        other.write_text("{}")
    assert path.stat().st_mode == other.stat().st_mode
    assert load_file(path)["a"].tolist() == [0, 1, 2]


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"a": torch.arange(3)})
    path.chmod(0o640)
    write_tensors(path, {"a": torch.arange(4)})
    assert path.stat().st_mode & 0o777 == 0o640
