"""A project's settings, what becomes of them here (PROJECT.toml in this folder), and the job that comes of it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import tomli_w

from headrace.errors import ConfigError, FailedPrecondition, InvalidArgument
from headrace.job.load.load import load, read
from headrace.job.rules.scope import scope_of_check
from headrace.job.schema.job import toml_value
from headrace.job.schema.placement import PlacementSection
from headrace.migrate.bash import COMPUTED, DECIDED_LATER, script_text

State = Literal["carried", "changed", "no counterpart"]

_ANY_MODEL = ("--hf-checkpoint", "MODEL")
"""A job needs one before anything else of it can be checked."""
_NEEDED = ("--hf-checkpoint", "--prompt-data", "--rollout-batch-size", "--n-samples-per-prompt")
"""A job without them is not the one that was meant, so a rule that they break refuses it."""
_SECRET = re.compile(r"((?:token|secret|password|(?:api|wandb)[-_]key)['\"]?[:= ]+)\S.*", re.IGNORECASE | re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_PER_ENGINE = "--rollout-num-gpus-per-engine"
_GPUS_OF_A_MACHINE = 8
_MISSING = "not given"
"""In a refusal of a job that lacks something: what it names is not too much."""
_LEAVE_OUT = re.compile(r"[Ll]eave (--[\w-]+) out")
_REACHED = ("--service-host", "HOST", "--tls-dir", "tls")
_REPLACE = "replace HOST by the address of the first machine, and make the folder tls with `headrace certs`"
_REPLACE_ALL = (
    "replace SHARED by a folder that all machines see, and start a rollout service on each HOST-k: docs/placement.md"
)


@dataclass(frozen=True, slots=True)
class Moved:
    """A setting of the source. `words` are the flags that it becomes here; `note` says what to know or to do."""

    source: str
    state: State
    words: Sequence[str] = ()
    note: str = ""

    @property
    def line(self) -> str:
        """For the list of what is not simply carried."""
        here = f" -> {' '.join(self.words)}" if self.words and self.state == "changed" else ""
        return _printable(f"{self.source}{here}{f': {self.note}' if self.note else ''}")


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

    def supervise(self, source: str) -> None:
        words = ("--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--loss-mask-type", "qwen")
        note = "rows are conversations; --loss-mask-type names the template's marks"
        self.change(source, *words, "--input-key", "messages", note=note)

    def drop(self, source: str, why: str) -> None:
        """A setting without counterpart."""
        self._list(source, "no counterpart", (), why)

    def _take(self, source: str, state: State, words: Sequence[str], note: str) -> None:
        if names := sorted({name for word in words for name in _VARIABLE.findall(word)}):
            words = [_VARIABLE.sub(r"\1", word) for word in words]
            unset = f"set {', '.join(names)} before `headrace migrate`, or replace {'it' if not names[1:] else 'them'}"
            state, note = "changed", f"{note}; {unset}" if note else unset
        if (refusal := _refusal(tuple(words))) is not None:
            self.drop(source, refusal)
        else:
            self._list(source, state, words, note)

    def _list(self, source: str, state: State, words: Sequence[str], note: str) -> None:
        """Without the value of a key, because the list is shown and kept."""
        self.moved.append(Moved(_printable(_SECRET.sub(r"\1…", source)), state, words, _printable(note)))

    @property
    def words(self) -> list[str]:
        """The flags of the whole job; of one that is set twice the last counts, as on a command line."""
        return [word for setting in self.moved for word in setting.words]

    def settle(self) -> str | None:
        """Gives up settings that a rule of headrace refuses together with the others, with the rule's message.

        Returns why the job is refused after that; None if `headrace check --elsewhere` takes it.
        """
        try:
            self._place(read(None, self.words, {}).placement)
        except ConfigError as error:
            return error.message
        while True:
            try:
                load(None, self.words, {}, lambda job: scope_of_check(job, elsewhere=True))
            except ConfigError as error:
                number = None if _MISSING in error.message else self._named_in(error.message)
                if number is None:
                    return error.message
                refused = self.moved[number]
                self.moved[number] = Moved(refused.source, "no counterpart", note=_printable(error.message))
            else:
                return None

    def _named_in(self, refusal: str) -> int | None:
        """The setting that a refusal says to leave out, or the first that it names."""
        advised = _LEAVE_OUT.search(refusal)
        for text in [advised[1], refusal] if advised else [refusal]:
            places = {
                number: place
                for number, setting in enumerate(self.moved)
                if not set(setting.words) & set(_NEEDED)
                for word in setting.words
                if word.startswith("--") and (place := _place(word, text)) is not None
            }
            if places:
                return min(places, key=lambda number: places[number])
        return None

    def _place(self, placement: PlacementSection) -> None:
        """The engines have GPUs for one at least. Machines have addresses."""
        wanted, most = placement.rollout_num_gpus_per_engine, max(placement.actor_num_gpus_per_node, _GPUS_OF_A_MACHINE)
        if wanted > most and placement.colocate:
            note = "an engine that takes turns with ranks is on one machine"
            self.moved = [
                Moved(setting.source, "changed", (_PER_ENGINE, str(most)), note)
                if _PER_ENGINE in setting.words
                else setting
                for setting in self.moved
            ]
        elif wanted > most and "--num-gpus-per-node" not in self.words:
            self.change("machines of an engine", "--num-gpus-per-node", str(most), note="the GPUs of a machine")
        if wanted > 1 and not placement.colocate and "--rollout-num-gpus" not in self.words:
            gpus = str(wanted)
            self.change("GPUs of the engines", "--rollout-num-gpus", gpus, note="one engine; give more for more")
        if placement.actor_num_nodes < 2:
            return
        where, common = f"{placement.actor_num_nodes} machines", ("--placement", "ray", *_REACHED)
        if placement.colocate:
            hosts = ",".join(f"HOST-{number}:7002" for number in range(placement.actor_num_nodes))
            words = (*common, "--rollout-address", hosts, "--update-weight-disk-path", "SHARED")
            self.change(f"{where}, shared by training and rollouts", *words, note=f"{_REPLACE}; {_REPLACE_ALL}")
        else:
            self.change(where, *common, "--rollout-placement", "ray", note=_REPLACE)

    def toml(self, refusal: str | None = None) -> str:
        """The job's file: its settings by section, and above them what a person has to know.

        Raises ConfigError where the source names no model.
        """
        tree = read(None, self.words, {}).model_dump(mode="python", exclude_unset=True, exclude_none=True)
        tables = {section: toml_value(table) for section, table in tree.items() if table}
        head = [f"From {_printable(self.origin)}, by `headrace migrate`."]
        head += [] if refusal is None else [f"`headrace check` refuses it: {_printable(refusal)}"]
        head += [f"{moved.state}: {moved.line}" for moved in (*self.of("changed"), *self.of("no counterpart"))]
        return "".join((*(f"# {line}\n" for line in head), "\n", tomli_w.dumps(tables)))

    def of(self, state: State) -> list[Moved]:
        return [setting for setting in self.moved if setting.state == state]


@lru_cache(4096)
def _refusal(words: tuple[str, ...]) -> str | None:
    try:
        read(None, [*_ANY_MODEL, *words], {})
    except ConfigError as error:
        return error.message.removeprefix(f"{words[0]} is not a flag of headrace: ")
    return None


def _printable(text: str) -> str:
    """One line that a terminal and a TOML comment take."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def _place(flag: str, text: str) -> int | None:
    """Where a text names a flag or its option."""
    name = flag.removeprefix("--")
    option = re.escape(name.replace("-", "_"))
    found = re.search(rf"--{re.escape(name)}(?![\w-])|(?<![\w-]){option}\b", text)
    return None if found is None else found.start()


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
