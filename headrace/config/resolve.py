"""What follows from what was given: absolute paths and the batch arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headrace.config.batch import derive
from headrace.config.job import Job
from headrace.config.prompt_path import PromptPath
from headrace.config.training import HooksSection
from headrace.models.presets import find

_HOOKS = (
    "custom_generate_function_path",
    "custom_rm_path",
    "dynamic_sampling_filter_path",
    *HooksSection.model_fields,
    "buffer_filter_path",
    "data_source_path",
)


def resolve(job: Job) -> Job:
    """Paths are taken from the working directory, parallel sizes from the preset, and one of the four batch sizes is
    derived. Raises ConfigError.
    """
    sections = {name: value for name, value in job if isinstance(value, BaseModel)}
    absolute = job.model_copy(update={name: _absolute(section) for name, section in sections.items()})
    return derive(_shards(_layout(absolute)))


def _layout(job: Job) -> Job:
    """A preset's parallel sizes, unless the job gives its own."""
    if job.model.model is None:
        return job
    return job.model_copy(update={"megatron": {**find(job.model.model).layout, **job.megatron}})


def _shards(job: Job) -> Job:
    """Whoever asks for the buffer's address gets those of all shards."""
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
    if name in _HOOKS and isinstance(value, str) and ".py:" in value:
        file, colon, function = value.rpartition(":")
        return f"{Path(file).expanduser().absolute()}{colon}{function}"
    return value
