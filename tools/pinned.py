"""What the files of `requirements/` pin, as data: for the audit and the bills of materials."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
_LINE = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)")


class Pin(NamedTuple):
    """A package in one version."""

    name: str
    version: str


def pins_of(file: Path) -> Sequence[Pin]:
    """Returns the pins in order, without hashes, extras and markers. Raises ValueError for a line without a pin."""
    found = []
    for line in file.read_text().splitlines():
        text = line.split(" #")[0].strip()
        if not text or text.startswith(("#", "--hash")):
            continue
        match = _LINE.match(text)
        if match is None:
            raise ValueError(f"{file.name} has a line that pins no version: {text}")
        found.append(Pin(canonicalize_name(match[1]), match[2]))
    return found


def files() -> Sequence[Path]:
    """All of them, by name."""
    return sorted(FOLDER.glob("*.txt"))
