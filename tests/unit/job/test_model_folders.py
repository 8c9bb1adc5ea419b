"""Model folders that lack something, or hold a part of it: a start is refused with the file's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "it has no config.json"),
        ("tokenizer.json", r"it has no tokenizer \(tokenizer.json or"),
        ("model.safetensors", r"it has no weights \(\*.safetensors\)"),
    ],
)
def test_a_model_folder_that_is_not_whole(load_with, model: Path, missing: str, message: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        load_with()


@pytest.mark.parametrize(
    ("index", "num_bytes", "message"),
    [
        (None, 3000, r"model\.safetensors has 3,000 bytes and should have 4,0\d\d: copy or download it again"),
        (None, 7, r"model\.safetensors is no safetensors file"),
        (
            '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}',
            None,
            "model-2.safetensors is not there",
        ),
        ('{"weight_map": {"a": 3, "b": "c"}}', None, r"model\.safetensors\.index\.json cannot be read"),
    ],
)
def test_weights_that_were_copied_in_part(
    load_with, model: Path, index: str | None, num_bytes: int | None, message: str
) -> None:
    if index is not None:
        (model / "model.safetensors.index.json").write_text(index)
    if num_bytes is not None:
        os.truncate(model / "model.safetensors", num_bytes)
    with pytest.raises(ConfigError, match=message):
        load_with()


def test_weights_that_cannot_be_read(load_with, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.unlink()
    weights.symlink_to(model / "blobs" / "0")  # as in a cache of which a container sees the links alone
    with pytest.raises(ConfigError, match=rf"user {os.getuid()} cannot read model.safetensors: chmod a\+r"):
        load_with()
