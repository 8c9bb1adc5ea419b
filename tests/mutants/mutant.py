"""A mutant: one place of one file, what stands there instead, and the tests that must notice."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
AREAS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.toml")))


@dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in the file."""

    area: str
    file: str
    old: str
    new: str
    killed_by: tuple[str, ...]

    @property
    def name(self) -> str:
        """Short, and the same while the mutant is."""
        content = f"{self.file}\0{self.old}\0{self.new}".encode()
        return f"{Path(self.file).stem}-{hashlib.sha256(content).hexdigest()[:6]}"

    def applied(self, source: str) -> str:
        """The changed source. Raises ValueError where the pattern does not occur exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file}: {source.count(self.old)} places have {self.old!r}: mend tests/mutants")
        return source.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.name} {self.file}: {_one_line(self.old)} -> {_one_line(self.new)}"


def mutants_of(area: str) -> list[Mutant]:
    """All of one list."""
    listed = tomllib.loads((Path(__file__).parent / f"{area}.toml").read_text())
    return [
        Mutant(area, target["file"], old, new, tuple(target["killed_by"]))
        for target in listed["target"]
        for old, new in target["mutants"]
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:110]
