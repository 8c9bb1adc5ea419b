"""What became of each setting of another project's job, and the job that comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import tomli_w

from headrace.errors import ConfigError
from headrace.job.load.load import read
from headrace.job.schema.job import Job, toml_value

State = Literal["carried", "changed", "no counterpart"]

_ANY_MODEL = ("--hf-checkpoint", "MODEL")
"""A job needs one before anything else of it can be checked."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A setting of the source. `words` are the flags that it becomes here; `note` says what to know or to do."""

    source: str
    state: State
    words: Sequence[str] = ()
    note: str = ""


@dataclass
class Migration:
    """Collects settings in the order of the source."""

    origin: str
    moved: list[Moved] = field(default_factory=list)

    def carry(self, source: str, *words: str, note: str = "") -> None:
        """A setting with the same meaning here. A value that headrace refuses is listed with its reason."""
        self._take(source, "carried", words, note)

    def change(self, source: str, *words: str, note: str) -> None:
        """A setting that means something else here, or that becomes several."""
        self._take(source, "changed", words, note)

    def drop(self, source: str, why: str) -> None:
        """A setting without counterpart."""
        self.moved.append(Moved(source, "no counterpart", note=why))

    def _take(self, source: str, state: State, words: Sequence[str], note: str) -> None:
        try:
            read(None, [*_ANY_MODEL, *words], {})
        except ConfigError as error:
            self.moved.append(Moved(source, "no counterpart", note=error.message))
        else:
            self.moved.append(Moved(source, state, words, note))

    @property
    def words(self) -> list[str]:
        """The flags of the whole job; of one that is set twice the last counts, as on a command line."""
        return [word for each in self.moved for word in each.words]

    def job(self) -> Job:
        """Raises ConfigError where the source names no model, or its settings exclude each other."""
        return read(None, self.words, {})

    def toml(self) -> str:
        """The job's file: its settings by section, and above them what a person has to know."""
        tree = self.job().model_dump(mode="python", exclude_unset=True, exclude_none=True)
        tables = {section: toml_value(table) for section, table in tree.items() if table}
        return "".join((*(f"# {line}\n" for line in self._head()), "\n", tomli_w.dumps(tables)))

    def _head(self) -> Iterable[str]:
        yield f"From {self.origin}, by `headrace migrate`."
        for state in ("changed", "no counterpart"):
            for each in self.of(state):
                yield f"{state}: {one_line(each)}"

    def of(self, state: str) -> list[Moved]:
        return [each for each in self.moved if each.state == state]


def one_line(moved: Moved) -> str:
    here = f" -> {' '.join(moved.words)}" if moved.words and moved.state == "changed" else ""
    return " ".join(f"{moved.source}{here}{f': {moved.note}' if moved.note else ''}".split())


Table = Mapping[str, str]
"""A name of the source, and the flag that means the same here."""


def carry_by_table(migration: Migration, source: str, flag: str, value: object) -> None:
    """A value of a configuration file or a call; False of a switch leaves it out."""
    if value is True:
        migration.carry(source, flag)
    elif value is False or value is None:
        migration.carry(source, note="the default here")
    elif isinstance(value, list | tuple):
        migration.carry(source, flag, *map(str, value))
    else:
        migration.carry(source, flag, str(value))
