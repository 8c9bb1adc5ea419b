"""The findings of a service about its part of a job, serializable for the way from its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import HeadraceError


class Report(msgspec.Struct):
    """Sentences for a person. `facts` are (what, how); anything in `refusals` keeps the run from starting."""

    facts: list[tuple[str, str]] = []
    refusals: list[str] = []
    warnings: list[str] = []
    unchecked: list[str] = []
    failed: list[str] = []
    """Why a service's check ended without a result."""

    def join(self, other: Report) -> None:
        """Adds the findings of another service."""
        self.facts += other.facts
        self.refusals += other.refusals
        self.warnings += other.warnings
        self.unchecked += other.unchecked
        self.failed += other.failed

    def refuse(self, error: HeadraceError, *, elsewhere: bool = False) -> None:
        """Notes the error as unchecked when the job is for another machine."""
        (self.unchecked if elsewhere else self.refusals).append(error.message)


class PromptRow(msgspec.Struct, frozen=True):
    """A prompt as the buffer will give it, serialized; `where` is its file and line."""

    where: str
    body: bytes

    def prompt(self) -> sample_pb2.Prompt:
        return sample_pb2.Prompt.FromString(self.body)


class Scorers(msgspec.Struct, frozen=True):
    """The number of rows that name an rm_type, and the first of them."""

    count: int
    where: str


def scorer_name(metadata: Mapping[str, Any]) -> str:
    """A row's `rm_type`; "" where it names none."""
    named = metadata.get("rm_type")
    return "" if named is None else named if isinstance(named, str) else f"{named!r:.80}"


def count_scorer(rm_types: dict[str, Scorers], name: str, where: str) -> bool:
    """True for the first row that names it."""
    before = rm_types.get(name)
    rm_types[name] = Scorers(before.count + 1, before.where) if before else Scorers(1, where)
    return before is None


class Prompts(msgspec.Struct):
    """Results of the buffer's check for the others: some rows, and the rm_types of all that were read."""

    rows: list[PromptRow] = []
    rm_types: dict[str, Scorers] = {}
    """Scorers by name; "" for rows that name none."""
    num_rows: int = 0


class BufferReport(msgspec.Struct):
    """The buffer's own, with the prompts that it read."""

    report: Report
    prompts: Prompts


def counted(rm_types: Mapping[str, Scorers]) -> str:
    """`math 12, gpqa 3`, most first."""
    found: Sequence[tuple[str, Scorers]] = sorted(rm_types.items(), key=lambda item: -item[1].count)
    return ", ".join(f"{name} {scorers.count:,}" for name, scorers in found)
