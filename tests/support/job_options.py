"""Which options of a job a service reads, and whether its parts hold their values."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.job.option import options
from headrace.job.schema.job import Job
from headrace.job.schema.section import Section
from headrace.limits import syntax_tree
from tools.flags import described

Readers = Mapping[str, Sequence[Callable[[Any], object]]]
"""By option: how to read its value off the built parts, at each place where one holds it."""

_OPTIONS = {option.name: option.section for option in described()}


def _is_validated() -> bool:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_name not in ("model_validate", "model_validate_json"):
        frame = frame.f_back
    return frame.f_back is not None


@contextmanager
def options_read() -> Iterator[set[str]]:
    """Collects the options that are read from any section of a job in the block, by others than its validators."""
    found: set[str] = set()
    plain = Section.__getattribute__

    def traced(section: Section, name: str) -> Any:
        if name in _OPTIONS and type(section) is Job.model_fields[_OPTIONS[name]].annotation and not _is_validated():
            found.add(name)
        return plain(section, name)

    Section.__getattribute__ = traced  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del Section.__getattribute__


def options_named_in(files: Collection[Path]) -> set[str]:
    """The options that code reads as attributes, also where it does so after the parts are built.

    An option of one word counts only as an attribute of its section: `model.model`, and not `self.model`.
    """
    nodes = [node for file in files for node in ast.walk(syntax_tree(file.read_text()))]
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in _OPTIONS
        if "_" in node.attr or _last_name(node.value) == _OPTIONS[node.attr]
    }


def value_of(job: Job, option: str) -> object:
    """The job's value. Megatron's options are by name in one table."""
    section = _OPTIONS[option]
    return job.megatron[option] if section == "megatron" else getattr(getattr(job, section), option)


def default_of(option: str) -> object:
    """What a job has that does not give the option."""
    return options()[option].default


def ignored(job: Job, parts: Any, readers: Readers) -> list[str]:
    """A line for each option whose value a part does not hold, and for each that the job leaves at its default."""
    lines = []
    for option, reads in readers.items():
        wanted = value_of(job, option)
        if wanted == default_of(option):
            lines.append(f"{option}: the job has its default {wanted!r}, which shows nothing")
        held = [read(parts) for read in reads]
        lines += [
            f"{option}: the job says {wanted!r}, part {k} has {value!r}"
            for k, value in enumerate(held)
            if value != wanted
        ]
    return lines


def same(values: Sequence[object]) -> object:
    """The one value of them all; all of them where they differ."""
    return values[0] if all(value == values[0] for value in values) else values


def _last_name(node: ast.expr) -> str:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_")
