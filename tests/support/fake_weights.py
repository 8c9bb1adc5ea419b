"""Weights of the fake engine: texts by name, in a folder or by their checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from headrace.delta import PREFIX

DELTA = f"{PREFIX}0"


def write_version(folder: Path, weights: Mapping[str, str]) -> None:
    """A folder of weights as the fake loads it, with the files that a real one has."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    contents = {name: np.frombuffer(content.encode(), np.uint8) for name, content in weights.items()}
    save_file(contents, folder / "model.safetensors")


def delta(weights: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """What changed since the base, as a single tensor."""
    return {DELTA: json.dumps(dict(weights.items() - base.items()))}


def loaded_into(weights: Mapping[str, str], received: Mapping[str, str]) -> dict[str, str]:
    """What an engine has then."""
    changed = json.loads(received.get(DELTA, "{}"))
    return {**weights, **{name: text for name, text in received.items() if name != DELTA}, **changed}


def fake_checksum(content: str) -> str:
    """16 hexadecimal digits, as SGLang's."""
    return hashlib.sha256(content.encode()).hexdigest()[:16]
