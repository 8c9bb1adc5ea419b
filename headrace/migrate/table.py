"""A project's settings and what becomes of them here: PROJECT.toml in this folder."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.migrate.bash import COMPUTED, DECIDED_LATER, script_text
from headrace.migrate.moved import Migration

UNKNOWN = object()
"""The value of a setting that a script computes."""
_COMPUTED_THERE = "the script computes this value when it runs: set it yourself"
_FLAG = re.compile(r"--[\w-]+")


@dataclass(frozen=True)
class Row:
    """A setting: the flag that takes its value, the words of some values, or why there is no counterpart.

    In the file a string is a flag alone, or the reason.
    """

    flag: str = ""
    """Words that the value follows, or has the place of {value} in."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Words by the value."""
    other: str = ""
    """Why other values have no counterpart."""
    note: str = ""
    changed: str = ""
    """The note of a setting that means something else here."""
    when: str = ""
    """A setting without which this one has no effect."""
    unless: str = ""
    """A setting beside which this one has no effect."""

    def move(self, migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
        words = self._words(value)
        if self.unless and settings.get(self.unless) not in (None, -1):
            migration.carry(source, note=f"{self.unless} counts")
        elif self.when and not settings.get(self.when):
            migration.carry(source, note=f"no effect without {self.when}")
        elif words is None:
            migration.drop(source, self.other)
        elif self.changed:
            migration.change(source, *words, note=self.changed)
        else:
            migration.carry(source, *words, note=self.note or ("" if words else "the default here"))

    def _words(self, value: Any) -> Sequence[str] | None:
        values = list(value) if isinstance(value, list | tuple) else [value]
        texts = [json.dumps(part) if part is None or isinstance(part, bool | dict) else str(part) for part in values]
        known = [self.words.get(text) for text in texts]
        if None not in known or not self.flag:
            refused = self.other and None in known
            return None if refused else [word for words in known if words for word in words.split()]
        if value is None or isinstance(value, bool):
            return self.flag.split() if value else []
        if "{value}" in self.flag:
            return [word.replace("{value}", texts[0]) for word in self.flag.split()]
        return [*self.flag.split(), *texts]


Values = Mapping[str, Any]
Mover = Callable[[Migration, str, Any, Values], None]
"""Takes a setting that a row does not describe: (migration, its source, its value, the values of all)."""


class Table:
    """The rows of a project, and what it does without a setting where headrace does something else."""

    def __init__(self, project: str, own: Mapping[str, Mover] | None = None) -> None:
        tree = tomllib.loads(Path(__file__).with_name(f"{project}.toml").read_text(encoding="utf-8"))
        self.defaults: Values = tree["defaults"]
        self.rows = {name: _row(entry) for name, entry in tree["settings"].items()}
        self._own = own or {}

    def move(self, migration: Migration, settings: Mapping[str, tuple[str, Any]], defaults: Values) -> None:
        """Settings by name, each with its source and value, and then the defaults of those that are missing."""
        values = {**defaults, **{name: value for name, (_, value) in settings.items()}}
        for name, (source, value) in settings.items():
            self._move(migration, source, name, value, values)
        added = Migration("")
        for name in (name for name in defaults if name not in settings):
            self._move(added, name, name, values[name], values)
        for moved in added.moved:
            if moved.words:
                migration.moved.append(replace(moved, state="changed", note=moved.note or "the default there"))

    def _move(self, migration: Migration, source: str, name: str, value: Any, values: Values) -> None:
        if value is UNKNOWN:
            migration.drop(source, _COMPUTED_THERE)
        elif isinstance(value, str) and (why := unknown_value(value)):
            migration.drop(source, why)
        elif name in self._own:
            self._own[name](migration, source, value, values)
        else:
            self.row(name).move(migration, source, value, values)

    def row(self, name: str) -> Row:
        """That of the name, or of a table that it is in: a reason, or a flag with {name} in it."""
        if name in self.rows:
            return self.rows[name]
        above, _, last = name.rpartition(".")
        while above:
            row = self.rows.get(above)
            if row and "{name}" in row.flag:
                flag = last.replace("_", "-")
                words = {value: words.replace("{name}", flag) for value, words in row.words.items()}
                return replace(row, flag=row.flag.replace("{name}", flag), words=words)
            if row and not row.flag and not row.words:
                return row
            above = above.rpartition(".")[0]
        return Row(other="no option of headrace means this")


def _row(entry: str | Mapping[str, Any]) -> Row:
    if isinstance(entry, str):
        return Row(flag=entry) if _FLAG.fullmatch(entry) else Row(other=entry)
    return Row(**entry)


def leaves(tree: Mapping[Any, Any], whole: Sequence[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of nested tables by their dotted names. Those of `whole` are values."""
    for key, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in whole:
            yield from leaves(value, whole, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flags_of(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with their values; words before the first flag are none of the training's."""
    flag, values = "", list[str]()
    for word in words:
        if word.removeprefix(DECIDED_LATER).startswith("--"):
            if flag:
                yield flag, values
            flag, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    if flag:
        yield flag, values


def parsed_yaml(path: Path) -> Any:
    """Raises InvalidArgument for what is no YAML, and FailedPrecondition where PyYAML is missing."""
    try:
        import yaml
    except ImportError as error:
        raise FailedPrecondition(f"{path} is YAML, which PyYAML reads: pip install 'headrace[migrate]'") from error
    try:
        return yaml.safe_load(script_text(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no YAML: {error}") from error


def unknown_value(text: str) -> str | None:
    """Why a value of a script cannot be carried; None if it can."""
    if text.startswith(DECIDED_LATER):
        return "the script decides this when it runs: set it yourself"
    if COMPUTED in text:
        return _COMPUTED_THERE
    return None
