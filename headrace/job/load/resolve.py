"""Derives the rest of a job: absolute paths, hooks' functions, parallel sizes and the batch arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headrace.errors import ConfigError
from headrace.job.rules.hook_files import HOOK_LEAVES, completed
from headrace.job.schema.batch import derive
from headrace.job.schema.job import Job
from headrace.job.schema.prompt_path import PromptPath
from headrace.models.presets import find


def resolve(job: Job) -> Job:
    """Completes what the job options open. Raises ConfigError.

    Paths are taken from the working directory, a hook's file is completed by its only function, parallel sizes come
    from the preset, and one of the four batch sizes is derived.
    """
    job = _engine_ranks(job)
    sections = {name: value for name, value in job if isinstance(value, BaseModel)}
    absolute = job.model_copy(update={name: _absolute(section) for name, section in sections.items()})
    return derive(_shards(_layout(_hooks(absolute))))


def _engine_ranks(job: Job) -> Job:
    """Moves --sglang-tp-size to rollout_num_gpus_per_engine, which it is another name of."""
    if "tp_size" not in job.sglang:
        return job
    size, each = job.sglang["tp_size"], job.placement.rollout_num_gpus_per_engine
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"--sglang-tp-size {size}: should be a number of 1 or more", field="sglang.tp_size")
    if "rollout_num_gpus_per_engine" in job.placement.model_fields_set and size != each:
        raise ConfigError(
            f"--sglang-tp-size {size} contradicts rollout_num_gpus_per_engine {each}, which is the same setting: "
            f"leave one out",
            field="sglang.tp_size",
        )
    placement = job.placement.model_copy(update={"rollout_num_gpus_per_engine": size})
    arguments = {name: value for name, value in job.sglang.items() if name != "tp_size"}
    return job.model_copy(update={"placement": placement, "sglang": arguments})


def _hooks(job: Job) -> Job:
    """Completes `f.py` by the only function in it that fits."""
    update = {}
    for section in ("rollout", "reward", "hooks", "buffer", "data"):
        values = getattr(job, section)
        paths = {name: value for name, value in values if name in HOOK_LEAVES and value is not None}
        whole = {name: completed(name, path, group_rm=job.reward.group_rm) for name, path in paths.items()}
        update[section] = values.model_copy(update=whole)
    return job.model_copy(update=update)


def _layout(job: Job) -> Job:
    """Adds a preset's parallel sizes where the job gives none."""
    if job.model.model is None:
        return job
    return job.model_copy(update={"megatron": {**find(job.model.model).layout, **job.megatron}})


def _shards(job: Job) -> Job:
    """Sets buffer_address to the addresses of all shards."""
    if not job.buffer.buffer_addresses or job.services.buffer_address:
        return job
    address = ",".join(job.buffer.buffer_addresses)
    return job.model_copy(update={"services": job.services.model_copy(update={"buffer_address": address})})


def _absolute(section: BaseModel) -> BaseModel:
    return section.model_copy(update={name: _made_absolute(name, value) for name, value in section})


def _made_absolute(name: str, value: Any) -> Any:
    if isinstance(value, Path):
        return value.expanduser().absolute()
    if name == "prompt_data":
        return tuple(PromptPath.parse(text).absolute() for text in value)
    if name == "eval_prompt_data":
        return tuple((dataset, path.expanduser().absolute()) for dataset, path in value)
    if name in HOOK_LEAVES and isinstance(value, str):
        return _absolute_hook(value)
    return value


def _absolute_hook(path: str) -> str:
    file, colon, function = path.rpartition(":") if ".py:" in path else (path, "", "")
    if not file.endswith(".py"):
        return path
    return f"{Path(file).expanduser().absolute()}{colon}{function}"
