"""The data sets of a job's evaluations: those of --eval-prompt-data, and those of the TOML file of --eval-config."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, InvalidArgument
from headrace.job.schema.production import DataSection, EvalSection, RolloutSection
from headrace.job.schema.section import NonNegative, Positive, PromptPath, Score, Section, Share, Temperature
from headrace.job.table_file import TableFile
from headrace.limits import MAX_EVAL_DATASETS, MAX_SAMPLES_PER_GROUP, to_json

_TABLES = ("defaults", "datasets")


def _encodable(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        to_json(metadata)
    except InvalidArgument as error:
        raise ValueError(error.message) from error
    return metadata


PASS_REWARD = 1.0
"""Least reward of a sample that passes, for pass@k, where its set names none."""


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
            raise ConfigError(f"two data sets are called {name}: rename one")
    return found


def own_functions(sets: Sequence[EvalSet]) -> list[str]:
    """The paths of the generate functions of single data sets, each once."""
    paths = (each.custom_generate_function_path for each in sets)
    return list(dict.fromkeys(path for path in paths if path is not None))


def own_rewards(sets: Sequence[EvalSet]) -> list[str]:
    """The paths of the functions that score single data sets, each once."""
    return list(dict.fromkeys(each.custom_rm_path for each in sets if each.custom_rm_path is not None))


def _read(path: Path) -> list[EvalSet]:
    file = TableFile("eval_config", path, str)
    try:
        tree = tomllib.loads(file.read())
    except (ValueError, RecursionError) as error:
        file.refuse(f"it is not TOML: {error}")
    file.require_keys("", tree, _TABLES)
    defaults, datasets = tree.get("defaults", {}), tree.get("datasets", [])
    if not isinstance(defaults, dict) or not isinstance(datasets, list) or not datasets:
        file.refuse("there must be one [[datasets]] or more, and [defaults] may be a table")
    for key in ("name", "path"):
        if key in defaults:
            file.refuse(f"[defaults] {key} would be the same for all: write it in each [[datasets]]")
    tables = [file.require_table("a data set", table) for table in datasets]
    return [_set(file, number, {**defaults, **table}) for number, table in enumerate(tables, 1)]


def _set(file: TableFile, number: int, table: Mapping[str, Any]) -> EvalSet:
    where = f"data set {table.get('name', number)}"
    read = file.validated(EvalSet, where, table)
    if read.custom_rm_path is not None and read.rm_type is not None:
        file.refuse(f"{where}: rm_type {read.rm_type} and custom_rm_path both score it: leave one of them out")
    return read.model_copy(
        update={
            "path": (file.path.parent / read.path.expanduser()).absolute(),
            "custom_generate_function_path": _beside(file.path, read.custom_generate_function_path),
            "custom_rm_path": _beside(file.path, read.custom_rm_path),
        }
    )


def _beside(path: Path, hook: str | None) -> str | None:
    """Makes `file.py:fn` absolute, from the config's folder; `pkg.mod.fn` is as it is."""
    if hook is None or ".py:" not in hook:
        return hook
    file, _, function = hook.rpartition(":")
    return f"{(path.parent / Path(file).expanduser()).absolute()}:{function}"


T = TypeVar("T")


def eval_dataset(
    of_set: EvalSet,
    evaluation: EvalSection,
    rollout: RolloutSection,
    data: DataSection,
    max_prompts: int | None = None,
) -> rollout_pb2.EvalDataset:
    """Its rows, sampled as the set says, else as the [eval] section says, else as training is."""
    n_samples = of_set.n_samples_per_eval_prompt or evaluation.n_samples_per_eval_prompt
    return rollout_pb2.EvalDataset(
        name=of_set.name,
        path=str(of_set.path),
        n_samples_per_prompt=n_samples,
        sampling=sample_pb2.SamplingParams(
            temperature=_temperature(of_set, evaluation, rollout, n_samples),
            top_p=_first(of_set.top_p, evaluation.eval_top_p),
            top_k=_first(of_set.top_k, evaluation.eval_top_k),
            max_new_tokens=_first(
                of_set.max_response_len, evaluation.eval_max_response_len, rollout.rollout_max_response_len
            ),
            min_new_tokens=_first(of_set.min_new_tokens, evaluation.eval_min_new_tokens),
            stop=_first(of_set.stop, rollout.rollout_stop),
            stop_token_ids=_first(of_set.stop_token_ids, rollout.rollout_stop_token_ids),
        ),
        max_prompts=max_prompts,
        input_key=of_set.input_key or evaluation.eval_input_key or data.input_key,
        label_key=_first(of_set.label_key, evaluation.eval_label_key, data.label_key) or "",
        metadata_key=_first(of_set.metadata_key, data.metadata_key) or "",
        tool_key=_first(of_set.tool_key, evaluation.eval_tool_key, data.tool_key) or "",
        max_prompt_tokens=_first(of_set.max_prompt_len, evaluation.eval_max_prompt_len),
        max_context_tokens=_first(
            of_set.max_context_len, evaluation.eval_max_context_len, rollout.rollout_max_context_len
        ),
        rm_type=of_set.rm_type or "",
        reward_key=_first(of_set.reward_key, evaluation.eval_reward_key) or "",
        metadata_overrides_json=_overrides(of_set),
        generate_function_path=of_set.custom_generate_function_path or "",
        image_key=data.image_key or "",
        pass_reward=_first(of_set.pass_reward, PASS_REWARD),
    )


def _overrides(of_set: EvalSet) -> str:
    """A function of the set's own scores all its rows, whatever they name: the reward service has it by its path."""
    scorer = {} if of_set.custom_rm_path is None else {"rm_type": of_set.custom_rm_path}
    overrides = {**(of_set.metadata_overrides or {}), **scorer}
    return to_json(overrides) if overrides else ""


def _first(*values: T | None) -> T | None:
    """The first that is given."""
    return next((value for value in values if value is not None), None)


def _temperature(of_set: EvalSet, evaluation: EvalSection, rollout: RolloutSection, n_samples: int) -> float:
    """Greedy, unless the job asks for what sampling alone gives: several responses to a prompt, or a nucleus."""
    asked = _first(of_set.temperature, evaluation.eval_temperature)
    if asked is not None:
        return asked
    samples = n_samples > 1 or _first(of_set.top_p, evaluation.eval_top_p) is not None
    return rollout.rollout_temperature if samples else 0.0
