"""Replaces names of the Hugging Face hub in a job by paths: hf_checkpoint, prompt_data, eval_prompt_data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.hub import DatasetName, Tell, dataset_files, is_model_name, model_folder
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.section import PromptPath


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
