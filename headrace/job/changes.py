"""Compares the jobs of two starts of a run, option by option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.job.schema.job import Job
from headrace.job.schema.run import without_secrets

_UNTOLD = ("services", "run", "tracking", "placement")
"""Sections that change nothing of what is trained."""


@dataclass(frozen=True, slots=True)
class Change:
    """An option with its value in both jobs, as a person would write it."""

    section: str
    name: str
    old: str
    new: str

    @property
    def flag(self) -> str:
        """As on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_told(self) -> bool:
        """False for what changes nothing of what is trained."""
        return self.section not in _UNTOLD


def changed_options(old: Job, new: Job) -> list[str]:
    """The options that decide what is trained and that differ: `lr 1e-06 -> 2e-06`."""
    return [f"{each.name} {each.old} -> {each.new}" for each in changes(old, new) if each.is_told]


def changes(old: Job, new: Job) -> Iterator[Change]:
    """Yields all options that differ."""
    before, after = old.model_dump(), new.model_dump()
    for section, options in after.items():
        for name in {**before[section], **options}:
            was, now = before[section].get(name), options.get(name)
            if was != now:
                yield Change(section, name, *(_said(without_secrets({name: value})[name]) for value in (was, now)))


def _said(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")
    if isinstance(value, tuple | list):
        return " ".join(map(_said, value)) or "none"
    return str(value) if isinstance(value, bool | int | Path) else str(value)[:200]
