"""Loads a job from a TOML file, the environment and flags; each overrides the one before."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import ConfigError
from headrace.hub import DatasetName, Tell, dataset_files, is_model_name, model_folder
from headrace.job.load import flags
from headrace.job.load.flags import UNSUPPORTED, option_value, parse_flags
from headrace.job.load.resolve import resolve
from headrace.job.megatron import MegatronArgs
from headrace.job.option import ALIASES, Arity, Option, Setting, options
from headrace.job.rules.rules import check
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job, without_constants
from headrace.job.schema.section import PromptPath, literal, normalize
from headrace.limits import did_you_mean, shown
from headrace.rpc.client import VARIABLES as TOKENS

PREFIX = "HEADRACE_"
SGLANG_PREFIX = "HEADRACE_SGLANG_"
_MAX_FILE_BYTES = 16 << 20


def read_file(path: Path, known: Mapping[str, Option]) -> list[Setting]:
    """Settings of a job file. Raises ConfigError that names file, section and key."""
    tree = _parsed(path)
    settings: list[Setting] = []
    for section, table in tree.items():
        if section not in Job.model_fields:
            raise ConfigError(f"{path}: {_unknown_top(section, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is not a table: write [{section}] on its own line")
        settings += [_of_file(path, section, key, value, known) for key, value in table.items()]
    return settings


def read_environment(environment: Mapping[str, str], known: Mapping[str, Option]) -> list[Setting]:
    """Settings of HEADRACE_<OPTION> variables. Raises ConfigError for an unknown one. Tokens are no settings."""
    return [
        _of_environment(variable, text, known)
        for variable, text in sorted(environment.items())
        if variable.startswith(PREFIX) and variable not in TOKENS
    ]


def _parsed(path: Path) -> dict[str, Any]:
    """Parses TOML, or the job.json of a run's folder, where absent values are null."""
    text = _text(path)
    try:
        if path.suffix != ".json":
            return tomllib.loads(text)
        tree: Any = json.loads(text)
    except (ValueError, RecursionError) as error:  # both parsers' errors
        raise ConfigError(f"{path} is not {path.suffix.removeprefix('.').upper() or 'TOML'}: {error}") from error
    if not isinstance(tree, dict) or not all(isinstance(table, dict) for table in tree.values()):
        raise ConfigError(f"{path} is not a job: it must be an object of sections, each an object")
    return {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in without_constants(tree).items()
    }


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigError(f"job file {path} is a folder: name the file in it")
        if not path.is_file():
            raise ConfigError(f"job file {path} does not exist")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"job file {path} is larger than {_MAX_FILE_BYTES} bytes, so it is not a job")
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"job file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"job file {path} is not text: {error}") from error


def _of_file(path: Path, section: str, key: str, value: Any, known: Mapping[str, Option]) -> Setting:
    origin = f"{path} [{section}] {key}"
    if section == "sglang":
        flags.require_known(key, origin)
        return Setting(section, key, value, origin)
    name = ALIASES.get(key, key)
    if name in known and known[name].section == section:
        return Setting(section, name, value, origin)
    if name in known:
        raise ConfigError(f"{origin}: unknown key here: it belongs in [{known[name].section}]")
    if key in UNSUPPORTED:
        raise ConfigError(f"{origin}: not a key of headrace: {UNSUPPORTED[key]}")
    names = [option.name for option in known.values() if option.section == section]
    near = did_you_mean(key, names) or did_you_mean(key, [option.name for option in known.values()])
    raise ConfigError(f"{origin}: unknown key{near}")


def _unknown_top(key: str, known: Mapping[str, Option]) -> str:
    name = ALIASES.get(key, key)
    if name in known:
        return f"{key} must stand in a section: put it under [{known[name].section}]"
    return f"unknown section [{key}]{did_you_mean(key, Job.model_fields)}"


def _of_environment(variable: str, text: str, known: Mapping[str, Option]) -> Setting:
    if variable.startswith(SGLANG_PREFIX) and variable.removeprefix(PREFIX).lower() not in known:
        name = variable.removeprefix(SGLANG_PREFIX).lower()
        flags.require_known(name, variable)
        return Setting("sglang", name, literal(text), variable)
    key = variable.removeprefix(PREFIX).lower()
    name = ALIASES.get(key, key)
    if name not in known:
        if name in UNSUPPORTED:
            raise ConfigError(f"{variable} is not a variable of headrace: {UNSUPPORTED[name]}")
        near = did_you_mean(variable, [option.variable for option in known.values()])
        raise ConfigError(f"unknown environment variable {variable}{near}")
    option = known[name]
    try:
        words = shlex.split(text) if option.arity in (Arity.MANY, Arity.PAIRS) else [text]
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}") from error
    return Setting(option.section, option.name, option_value(option, words, variable), variable)


M = TypeVar("M", bound=BaseModel)


def load(
    path: Path | None,
    argv: Sequence[str],
    environment: Mapping[str, str],
    scope_of: Callable[[Job], Scope] = Scope.of_train,
    note: Callable[[str], None] = lambda _: None,
) -> Job:
    """The job with everything derived, checked for the services that a command starts.

    Names of the hub become paths. `note` is called for what is downloaded, and for flags that are given more than once.
    Raises ConfigError that names the place of the mistake, and Unavailable where the hub is needed and not there.
    """
    job = resolve(with_hub_files(read(path, argv, environment, note), scope_of, note))
    check(job, scope_of(job))
    return job


def read(
    path: Path | None, argv: Sequence[str], environment: Mapping[str, str], note: Callable[[str], None] = lambda _: None
) -> Job:
    """The job as it was written: the types of its options are checked, nothing is derived."""
    known = options()
    given = read_file(path, known) if path else []
    given += [*read_environment(environment, known), *parse_flags(argv, known, note)]
    for setting in given:
        if setting.section == "sglang":  # SGLang's arguments have no types here
            _require_normal(setting)
    settings = {(setting.section, setting.name): setting for setting in given}
    tree: dict[str, dict[str, Any]] = {}
    for setting in settings.values():
        tree.setdefault(setting.section, {})[setting.name] = setting.value
    megatron = _validated(MegatronArgs, tree.get("megatron", {}), ("megatron",), settings, known)
    if megatron.model_fields_set:
        tree["megatron"] = megatron.model_dump(exclude_unset=True)
    tree.setdefault("model", {})
    return _validated(Job, tree, (), settings, known)


def _require_normal(setting: Setting) -> None:
    if setting.value is None:
        raise ConfigError(f"{setting.origin} is null: leave it out to get SGLang's default")
    try:
        normalize(setting.value)
    except ValueError as error:
        raise ConfigError(f"{setting.origin}: {error}, got {shown(setting.value)}") from error


def _validated(
    model: type[M],
    tree: Mapping[str, Any],
    prefix: tuple[str, ...],
    settings: Mapping[tuple[str, str], Setting],
    known: Mapping[str, Option],
) -> M:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_messages(error, prefix, settings, known))) from error


def _messages(
    error: ValidationError,
    prefix: tuple[str, ...],
    settings: Mapping[tuple[str, str], Setting],
    known: Mapping[str, Option],
) -> Iterable[str]:
    for each in error.errors():
        section, name = [*prefix, *(str(part) for part in each["loc"])][:2]
        if each["type"] == "missing":
            yield f"{name} is not given: set it under [{section}] of the job file or pass {known[name].flag}"
        else:
            message = each["msg"].removeprefix("Input ").removeprefix("Value error, ")
            yield f"{settings[section, name].origin}: {_inside(each['loc'])}{message}, got {shown(each['input'])}"


def _inside(location: Sequence[int | str]) -> str:
    """Names the table of a list, and its key, that are mistaken."""
    match location:
        case [_, _, int(number), str(key), *_]:
            return f"number {number + 1}, {key}: "
    return ""


# A model that the job names by its name on the hub.


def with_hub_files(job: Job, scope_of: Callable[[Job], Scope], tell: Tell) -> Job:
    """The job as it was written, with a path for each name that a service of the scope needs.

    Nothing is downloaded for another machine. Raises what `headrace.hub` raises.
    """
    if not _names_any(job):
        return job
    scope = scope_of(job)
    if scope.elsewhere is not None:
        return job
    update: dict[str, Any] = {}
    if {"trainer", "rollout"} & set(scope.services):
        update["model"] = _model(job, tell)
    if "buffer" in scope.services:
        update["data"] = _prompts(job, tell)
    if "rollout" in scope.services:
        update["eval"] = _evaluation(job, tell)
    return job.model_copy(update=update)


def _names_any(job: Job) -> bool:
    files = [*job.data.prompt_data, *(str(path) for _, path in job.eval.eval_prompt_data)]
    return is_model_name(str(job.model.hf_checkpoint)) or any(map(_dataset, files))


def _dataset(text: str) -> DatasetName | None:
    return DatasetName.parse(str(PromptPath.parse(text).path))


def _model(job: Job, tell: Tell) -> Any:
    name = str(job.model.hf_checkpoint)
    if not is_model_name(name):
        return job.model
    return job.model.model_copy(update={"hf_checkpoint": model_folder(name, "hf_checkpoint", tell)})


def _prompts(job: Job, tell: Tell) -> Any:
    """A split of several files has its share of the batches in equal parts."""
    given, weights = job.data.prompt_data, job.data.prompt_data_weights
    files = [_files(text, "prompt_data", "train", tell) for text in given]
    if all(len(own) == 1 for own in files):
        return job.data.model_copy(update={"prompt_data": tuple(own[0] for own in files)})
    shares = weights if len(weights) == len(given) else (1.0,) * len(given)
    update = {
        "prompt_data": tuple(file for own in files for file in own),
        "prompt_data_weights": tuple(share / len(own) for share, own in zip(shares, files, strict=True) for _ in own),
    }
    return job.data.model_copy(update=update)


def _evaluation(job: Job, tell: Tell) -> Any:
    sets = []
    for name, path in job.eval.eval_prompt_data:
        files = _files(str(path), f"eval_prompt_data {name}", "test", tell)
        if len(files) > 1:
            raise ConfigError(
                f"eval_prompt_data {name} {path}: the split has {len(files)} files, and an evaluation reads one: "
                f"name it, as {files[0]}"
            )
        sets.append((name, Path(files[0])))
    return job.eval.model_copy(update={"eval_prompt_data": tuple(sets)})


def _files(text: str, option: str, default_split: str, tell: Tell) -> Sequence[str]:
    """The text itself where it is a path. A slice stays with a split of one file."""
    dataset = _dataset(text)
    if dataset is None:
        return [text]
    files = dataset_files(dataset, option, default_split, tell)
    part = PromptPath.parse(text)
    if len(files) == 1:
        return [PromptPath(files[0], part.first_row, part.end_row).absolute()]
    if part.first_row or part.end_row is not None:
        raise ConfigError(f"{option} {text}: the split has {len(files)} files: name one of them, with its slice")
    return [str(file) for file in files]
