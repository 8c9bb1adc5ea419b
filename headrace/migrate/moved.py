"""What became of each setting of another project's job, and the job that comes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from headrace.errors import ConfigError, InvalidArgument
from headrace.job.load.load import load, read
from headrace.job.rules.scope import scope_of_check
from headrace.job.schema.job import Job, toml_value
from headrace.migrate.bash import COMPUTED, DECIDED_LATER, script_text

State = Literal["carried", "changed", "no counterpart"]

_ANY_MODEL = ("--hf-checkpoint", "MODEL")
"""A job needs one before anything else of it can be checked."""
_NEEDED = ("--hf-checkpoint", "--prompt-data", "--rollout-batch-size", "--n-samples-per-prompt")
"""A job without them is not the one that was meant, so a rule that they break refuses it."""
_SECRET = re.compile(r"((?:token|secret|password|api[-_]key|wandb[-_]key)[= ]+)\S.*", re.IGNORECASE | re.DOTALL)
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
        self.moved.append(Moved(_without_secret(source), "no counterpart", note=_printable(why)))

    def _take(self, source: str, state: State, words: Sequence[str], note: str) -> None:
        if names := sorted({name for word in words for name in _VARIABLE.findall(word)}):
            words = [_VARIABLE.sub(r"\1", word) for word in words]
            unset = f"set {', '.join(names)} before `headrace migrate`, or replace {'it' if not names[1:] else 'them'}"
            state, note = "changed", f"{note}; {unset}" if note else unset
        try:
            read(None, [*_ANY_MODEL, *words], {})
        except ConfigError as error:
            self.drop(source, error.message.removeprefix(f"{words[0]} is not a flag of headrace: "))
        else:
            self.moved.append(Moved(_without_secret(source), state, words, _printable(note)))

    @property
    def words(self) -> list[str]:
        """The flags of the whole job; of one that is set twice the last counts, as on a command line."""
        return [word for setting in self.moved for word in setting.words]

    def job(self) -> Job:
        """Raises ConfigError where the source names no model, or its settings exclude each other."""
        return read(None, self.words, {})

    def settle(self) -> str | None:
        """Gives up settings that a rule of headrace refuses together with the others, with the rule's message.

        Returns why the job is refused after that; None if `headrace check --elsewhere` takes it.
        """
        try:
            self._engines()
            self._several_machines()
        except ConfigError as error:
            return error.message
        refusal = ""
        for _ in range(len(self.moved) + 1):
            try:
                load(None, self.words, {}, lambda job: scope_of_check(job, elsewhere=True))
            except ConfigError as error:
                refusal = error.message
            else:
                return None
            number = None if _MISSING in refusal else self._named_in(refusal)
            if number is None:
                return refusal
            self.moved[number] = Moved(self.moved[number].source, "no counterpart", note=_printable(refusal))
        return refusal

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

    def _engines(self) -> None:
        """An engine is on one machine, and the engines have GPUs for one at least."""
        placement = self.job().placement
        wanted, most = placement.rollout_num_gpus_per_engine, max(placement.actor_num_gpus_per_node, _GPUS_OF_A_MACHINE)
        if wanted > most:
            self.moved = [
                Moved(setting.source, "changed", (_PER_ENGINE, str(most)), "an engine is on one machine here")
                if _PER_ENGINE in setting.words
                else setting
                for setting in self.moved
            ]
        if wanted > 1 and not placement.colocate and "--rollout-num-gpus" not in self.words:
            gpus = str(min(wanted, most))
            self.change("GPUs of the engines", "--rollout-num-gpus", gpus, note="one engine; give more for more")

    def _several_machines(self) -> None:
        placement = self.job().placement
        if placement.actor_num_nodes < 2:
            return
        where, common = f"{placement.actor_num_nodes} machines", ("--placement", "ray", *_REACHED)
        if placement.colocate:
            hosts = ",".join(f"HOST-{number}:7002" for number in range(placement.actor_num_nodes))
            shared = ("--rollout-address", hosts, "--update-weight-disk-path", "SHARED")
            self.change(
                f"{where}, shared by training and rollouts", *common, *shared, note=f"{_REPLACE}; {_REPLACE_ALL}"
            )
        else:
            self.change(where, *common, "--rollout-placement", "ray", note=_REPLACE)

    def toml(self, refusal: str | None = None) -> str:
        """The job's file: its settings by section, and above them what a person has to know.

        Raises ConfigError where the source names no model.
        """
        tree = self.job().model_dump(mode="python", exclude_unset=True, exclude_none=True)
        tables = {section: toml_value(table) for section, table in tree.items() if table}
        return "".join((*(f"# {line}\n" for line in self._head(refusal)), "\n", tomli_w.dumps(tables)))

    def _head(self, refusal: str | None) -> Iterable[str]:
        yield f"From {_printable(self.origin)}, by `headrace migrate`."
        if refusal is not None:
            yield f"`headrace check` refuses it: {_printable(refusal)}"
        for state in ("changed", "no counterpart"):
            for setting in self.of(state):
                yield f"{state}: {one_line(setting)}"

    def of(self, state: str) -> list[Moved]:
        return [setting for setting in self.moved if setting.state == state]


def one_line(moved: Moved) -> str:
    here = f" -> {' '.join(moved.words)}" if moved.words and moved.state == "changed" else ""
    return _printable(f"{moved.source}{here}{f': {moved.note}' if moved.note else ''}")


def _printable(text: str) -> str:
    """One line that a terminal and a TOML comment take."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def _without_secret(source: str) -> str:
    """A key's name without its value, because the list is shown and kept."""
    return _printable(_SECRET.sub(r"\1…", source))


def _place(flag: str, text: str) -> int | None:
    """Where a text names a flag or its option."""
    name = flag.removeprefix("--")
    option = re.escape(name.replace("-", "_"))
    found = re.search(rf"--{re.escape(name)}(?![\w-])|(?<![\w-]){option}\b", text)
    return None if found is None else found.start()


def unknown_value(text: str) -> str | None:
    """Why a value of a script cannot be carried; None if it can."""
    if text.startswith(DECIDED_LATER):
        return "the script decides this when it runs: set it yourself"
    if COMPUTED in text:
        return "the script computes this value when it runs: set it yourself"
    return None


Table = Mapping[str, str]
"""A name of the source, and the flag that means the same here."""
Mover = Callable[[Migration, str, Any, Mapping[str, Any]], None]
"""Takes a setting that needs more than another name: (migration, its source, its value, all settings)."""


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


def reason(name: str, reasons: Mapping[str, str]) -> str:
    """The reason of a dotted name, or of the section that it is in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((reasons[prefix] for prefix in prefixes if prefix in reasons), "no option of headrace means this")


def parsed_yaml(path: Path) -> Any:
    """Raises InvalidArgument for what is no YAML, or where PyYAML is missing."""
    try:
        import yaml
    except ImportError as error:
        raise InvalidArgument(f"{path} is YAML, and PyYAML is not installed: `pip install pyyaml`") from error
    try:
        return yaml.safe_load(script_text(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no YAML: {error}") from error


def classifier(model: str) -> tuple[str, ...]:
    """A reward model of Hugging Face."""
    return "--custom-rm-path", "headrace.hooks.kit.SequenceClassifier", "--reward-model-path", model
