"""Weights of the fake engine: texts by name, in a folder or by their checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_version(folder: Path, weights: Mapping[str, str]) -> None:
    """A folder of weights as the fake loads it, with the files that a real one has."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    contents = {name: np.frombuffer(content.encode(), np.uint8) for name, content in weights.items()}
    save_file(contents, folder / "model.safetensors")


def fake_checksum(content: str) -> str:
    """16 hexadecimal digits, as SGLang's."""
    return hashlib.sha256(content.encode()).hexdigest()[:16]
