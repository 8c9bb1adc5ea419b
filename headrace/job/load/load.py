"""Loads a job from a TOML file, the environment and flags; each overrides the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import ConfigError
from headrace.job.load.flags import parse_flags
from headrace.job.load.resolve import resolve
from headrace.job.load.sources import read_environment, read_file
from headrace.job.megatron.arguments import MegatronArgs
from headrace.job.option import Option, Setting, options
from headrace.job.rules.rules import check
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.sound import plain
from headrace.wire.checks import shown

M = TypeVar("M", bound=BaseModel)


def _unheard(_: str) -> None:
    """Ignores a note; for callers that read none."""


def load(
    path: Path | None,
    argv: Sequence[str],
    environment: Mapping[str, str],
    scope_of: Callable[[Job], Scope] = Scope.of_train,
    note: Callable[[str], None] = _unheard,
) -> Job:
    """The job with everything derived, checked for the services that a command starts.

    `note` is called for flags that are given more than once. Raises ConfigError that names the place of the mistake.
    """
    job = resolve(read(path, argv, environment, note))
    check(job, scope_of(job))
    return job


def read(
    path: Path | None, argv: Sequence[str], environment: Mapping[str, str], note: Callable[[str], None] = _unheard
) -> Job:
    """The job as it was written: the types of its options are checked, nothing is derived."""
    known = options()
    given = read_file(path, known) if path else []
    given += [*read_environment(environment, known), *parse_flags(argv, known, note)]
    for setting in given:
        if setting.section == "sglang":  # SGLang's arguments have no types here
            _require_plain(setting)
    settings = {(setting.section, setting.name): setting for setting in given}
    tree: dict[str, dict[str, Any]] = {}
    for setting in settings.values():
        tree.setdefault(setting.section, {})[setting.name] = setting.value
    megatron = _validated(MegatronArgs, tree.get("megatron", {}), ("megatron",), settings, known)
    if megatron.model_fields_set:
        tree["megatron"] = megatron.model_dump(exclude_unset=True)
    tree.setdefault("model", {})
    return _validated(Job, tree, (), settings, known)


def _require_plain(setting: Setting) -> None:
    if setting.value is None:
        raise ConfigError(f"{setting.origin} null is no value: leave it out for SGLang's default", field=setting.name)
    try:
        plain(setting.value)
    except ValueError as error:
        raise ConfigError(f"{setting.origin}: {error}, got {shown(setting.value)}", field=setting.name) from error


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
