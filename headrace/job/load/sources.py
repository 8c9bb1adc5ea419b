"""Reads settings from a TOML file and from the environment."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.job.load import sglang
from headrace.job.load.flags import option_value
from headrace.job.load.foreign import FOREIGN
from headrace.job.option import ALIASES, Arity, Option, Setting
from headrace.job.schema.job import Job
from headrace.job.schema.parts.literal import literal
from headrace.rpc.access.bearer import VARIABLES as TOKENS
from headrace.suggest import did_you_mean

PREFIX = "HEADRACE_"
SGLANG_PREFIX = "HEADRACE_SGLANG_"
_MAX_FILE_BYTES = 16 << 20


def read_file(path: Path, known: Mapping[str, Option]) -> list[Setting]:
    """Settings of a job file. Raises ConfigError that names file, section and key."""
    tree = _parsed(path)
    settings: list[Setting] = []
    for section, table in tree.items():
        if section not in Job.model_fields:
            raise ConfigError(f"{path}: {_unknown_top(section, known)}", field=section)
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is not a table: write [{section}] on its own line", field=section)
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
    return {name: {key: value for key, value in table.items() if value is not None} for name, table in tree.items()}


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
        sglang.require_known(key, origin)
        return Setting(section, key, value, origin)
    name = ALIASES.get(key, key)
    if name in known and known[name].section == section:
        return Setting(section, name, value, origin)
    if name in known:
        raise ConfigError(f"{origin}: unknown key here: it belongs in [{known[name].section}]", field=key)
    if key in FOREIGN:
        raise ConfigError(f"{origin}: not a key of headrace: {FOREIGN[key]}", field=key)
    names = [option.name for option in known.values() if option.section == section]
    near = did_you_mean(key, names) or did_you_mean(key, [option.name for option in known.values()])
    raise ConfigError(f"{origin}: unknown key{near}", field=key)


def _unknown_top(key: str, known: Mapping[str, Option]) -> str:
    name = ALIASES.get(key, key)
    if name in known:
        return f"{key} must stand in a section: put it under [{known[name].section}]"
    return f"unknown section [{key}]{did_you_mean(key, Job.model_fields)}"


def _of_environment(variable: str, text: str, known: Mapping[str, Option]) -> Setting:
    if variable.startswith(SGLANG_PREFIX) and variable.removeprefix(PREFIX).lower() not in known:
        name = variable.removeprefix(SGLANG_PREFIX).lower()
        sglang.require_known(name, variable)
        return Setting("sglang", name, literal(text), variable)
    key = variable.removeprefix(PREFIX).lower()
    name = ALIASES.get(key, key)
    if name not in known:
        if name in FOREIGN:
            raise ConfigError(f"{variable} is not a variable of headrace: {FOREIGN[name]}", field=variable)
        near = did_you_mean(variable, [option.variable for option in known.values()])
        raise ConfigError(f"unknown environment variable {variable}{near}", field=variable)
    option = known[name]
    try:
        words = shlex.split(text) if option.arity in (Arity.MANY, Arity.PAIRS) else [text]
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}", field=option.name) from error
    return Setting(option.section, option.name, option_value(option, words, variable), variable)
