"""The data sets of a job's evaluations: those of --eval-prompt-data, and those of the TOML file of --eval-config."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from headrace.errors import ConfigError, InvalidArgument
from headrace.job.schema.parts.prompt_path import PromptPath
from headrace.job.schema.production import EvalSection
from headrace.job.schema.section import NonNegative, Positive, Score, Section, Share, Temperature
from headrace.suggest import did_you_mean
from headrace.wire.checks import shown
from headrace.wire.json_text import to_json
from headrace.wire.limits import MAX_EVAL_DATASETS, MAX_SAMPLES_PER_GROUP

_MAX_FILE_BYTES = 1 << 20
_TABLES = ("defaults", "datasets")


def _encodable(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        to_json(metadata)
    except InvalidArgument as error:
        raise ValueError(error.message) from error
    return metadata


class EvalSet(Section):
    """One data set. What is absent is as the job's --eval-* flags say."""

    name: str
    path: Path
    n_samples_per_eval_prompt: Annotated[Positive, Field(le=MAX_SAMPLES_PER_GROUP)] | None = None
    interval: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Positive | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[NonNegative, ...] | None = None
    min_new_tokens: NonNegative | None = None
    max_response_len: Positive | None = None
    max_prompt_len: Positive | None = None
    max_context_len: Positive | None = None
    input_key: str | None = None
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    rm_type: str | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None
    metadata_overrides: Annotated[dict[str, Any], AfterValidator(_encodable)] | None = None
    custom_generate_function_path: str | None = None
    pass_reward: Score | None = None

    @property
    def prompts(self) -> PromptPath:
        """The path's file, and its slice. Raises ConfigError."""
        return PromptPath.parse(str(self.path), "eval_prompt_data")


def eval_sets(evaluation: EvalSection) -> Sequence[EvalSet]:
    """All of them. Raises ConfigError that names file and key, or a name that two data sets have."""
    found = [EvalSet(name=name, path=path) for name, path in evaluation.eval_prompt_data]
    if evaluation.eval_config is not None:
        found += _read(evaluation.eval_config)
    if len(found) > MAX_EVAL_DATASETS:
        raise ConfigError(f"{len(found)} data sets are to be evaluated, and {MAX_EVAL_DATASETS} is the limit")
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two data sets are called {name}: rename one", field="eval_prompt_data")
    return found


def own_rewards(sets: Sequence[EvalSet]) -> list[str]:
    """The paths of the functions that score single data sets, each once."""
    return list(dict.fromkeys(each.custom_rm_path for each in sets if each.custom_rm_path is not None))


def _read(path: Path) -> list[EvalSet]:
    tree = _parsed(path)
    for key in tree:
        if key not in _TABLES:
            raise _refusal(path, f"{key} is unknown{did_you_mean(key, _TABLES)}; write [defaults] and [[datasets]]")
    defaults, datasets = tree.get("defaults", {}), tree.get("datasets", [])
    if not isinstance(defaults, dict) or not isinstance(datasets, list) or not datasets:
        raise _refusal(path, "there must be one [[datasets]] or more, and [defaults] may be a table")
    for key in ("name", "path"):
        if key in defaults:
            raise _refusal(path, f"[defaults] {key} would be the same for all: write it in each [[datasets]]")
    return [_set(path, number, {**defaults, **_table(path, table)}) for number, table in enumerate(datasets, 1)]


def _table(path: Path, table: Any) -> Mapping[str, Any]:
    if not isinstance(table, dict):
        raise _refusal(path, f"a data set is {shown(table)}: write it as a table under [[datasets]]")
    return table


def _set(path: Path, number: int, table: Mapping[str, Any]) -> EvalSet:
    where = f"data set {table.get('name', number)}"
    for key in table:
        if key not in EvalSet.model_fields:
            raise _refusal(path, f"{where}: {key} is unknown{did_you_mean(key, EvalSet.model_fields)}")
    try:
        read = EvalSet.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        what = "is missing" if first["type"] == "missing" else f"{first['msg']}, got {shown(first['input'])}"
        raise _refusal(path, f"{where}: {key}: {what.removeprefix('Value error, ')}") from error
    if read.custom_rm_path is not None and read.rm_type is not None:
        raise _refusal(path, f"{where}: rm_type {read.rm_type} and custom_rm_path both score it: leave one of them out")
    return read.model_copy(
        update={
            "path": (path.parent / read.path.expanduser()).absolute(),
            "custom_generate_function_path": _beside(path, read.custom_generate_function_path),
            "custom_rm_path": _beside(path, read.custom_rm_path),
        }
    )


def _beside(path: Path, hook: str | None) -> str | None:
    """Makes `file.py:fn` absolute, from the config's folder; `pkg.mod.fn` is as it is."""
    if hook is None or ".py:" not in hook:
        return hook
    file, _, function = hook.rpartition(":")
    return f"{(path.parent / Path(file).expanduser()).absolute()}:{function}"


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise _refusal(path, f"it has more than {_MAX_FILE_BYTES} bytes, so it is no list of data sets")
        return tomllib.loads(text.decode())
    except OSError as error:
        raise _refusal(path, f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bytes that are no text, and TOML that does not parse
        raise _refusal(path, f"it is not TOML: {error}") from error


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"eval_config {path}: {why}", field="eval_config")
