"""Weights in shared memory: what a reader finds there, and whose memory is used again when."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from headrace.errors import FailedPrecondition, ResourceExhausted
from services.trainer.weights.buckets import MemoryFiles, make_private, segments_of

FILE = "model.safetensors"
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def write(files: MemoryFiles, root: Path, version: int, content: Mapping[str, torch.Tensor]) -> Path:
    folder = root / f"e1-v{version}-0a1b2c3d"
    folder.mkdir(parents=True)
    files.write(folder / FILE, content)
    return folder


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), DTYPES, st.booleans()), min_size=1, max_size=4))
def test_any_reader_of_safetensors_finds_every_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[list[int], torch.dtype, bool]]
) -> None:
    root = tmp_path_factory.mktemp("memory")
    content = {}
    for number, (shape, dtype, is_turned) in enumerate(tensors):
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        tensor = bits.view(dtype).squeeze(-1) if shape else bits.view(dtype)[0]
        content[f"t{number}"] = tensor.mT if is_turned and tensor.ndim > 1 else tensor
    found = load_file(write(MemoryFiles(), root, 1, content) / FILE)
    assert found.keys() == content.keys()
    for name, tensor in content.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_memory_of_a_deleted_version_is_used_again_and_that_of_others_stays_as_it_is(tmp_path: Path) -> None:
    files = MemoryFiles()
    folders = [write(files, tmp_path, version, {"t": torch.full((9,), float(version))}) for version in (1, 2)]
    assert [load_file(folder / FILE)["t"][0].item() for folder in folders] == [1.0, 2.0]
    first = (folders[0] / FILE).stat().st_ino
    shutil.rmtree(folders[0])
    third = write(files, tmp_path, 3, {"t": torch.full((9,), 3.0)})
    assert (third / FILE).stat().st_ino == first
    assert load_file(folders[1] / FILE)["t"].tolist() == [2.0] * 9
    assert load_file(third / FILE)["t"].tolist() == [3.0] * 9
    assert len(list((tmp_path / segments_of("e1-v3-0a1b2c3d")).iterdir())) == 2


def test_memory_that_is_short_is_an_error_that_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = MemoryFiles()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceExhausted, match=r"\d+ bytes of shared memory .*No space left.*--shm-size"):
        write(files, tmp_path, 1, {"t": torch.zeros(9)})
    assert list((tmp_path / segments_of("e1-v1-0a1b2c3d")).iterdir()) == []
    monkeypatch.undo()
    assert load_file(write(files, tmp_path, 2, {"t": torch.ones(9)}) / FILE)["t"].tolist() == [1.0] * 9


def test_a_folder_that_others_may_write_or_that_is_a_link_holds_no_weights(tmp_path: Path) -> None:
    make_private(tmp_path / "own")
    make_private(tmp_path / "own")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("open", "link"):
        with pytest.raises((FailedPrecondition, FileExistsError), match="this user alone"):
            make_private(tmp_path / name)
