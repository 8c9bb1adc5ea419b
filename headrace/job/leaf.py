"""Every option of a job with the number of words that it takes. Flags, variables and keys are derived from it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from headrace.job.megatron.arguments import MEGATRON_ALIASES, MegatronArgs
from headrace.job.schema.job import Job

ALIASES: Mapping[str, str] = {
    "tis_threshold": "tis_clip",
    "tis_upper_bound": "tis_clip",
    "tis_lower_bound": "tis_clip_low",
    "mis_mode": "tis_mode",
    "mis_level": "tis_level",
    "mis_upper_bound": "tis_clip",
    "mis_lower_bound": "tis_clip_low",
    "mis_veto_threshold": "rs_veto_threshold",
    "mis_batch_normalize": "tis_batch_normalize",
    "async_buffer_size": "max_staleness",
    "train_params": "only_train_params_name_list",
    "freeze_params": "freeze_params_name_list",
    **MEGATRON_ALIASES,
}
"""Other names of leaves: slime's, Megatron's, and views."""

OPPOSITES: Mapping[str, str] = {"grad_reduce_in_bf16": "grad_reduce_in_fp32"}
"""Switches of Megatron's script that turn a leaf off."""


class Shape(Enum):
    """The number of words that a flag takes."""

    SWITCH = "switch"
    ONE = "one"
    MANY = "many"
    PAIRS = "pairs"


@dataclass(frozen=True, slots=True)
class Leaf:
    section: str
    name: str
    shape: Shape
    description: str
    default: Any
    required: bool

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"HEADRACE_{self.name.upper()}"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value from the command line, a file or the environment.

    `origin` names the flag, the variable, or the file and section.
    """

    section: str
    name: str
    value: Any
    origin: str


@cache
def leaves() -> Mapping[str, Leaf]:
    """Every leaf by name, Megatron's included; aliases are not in it."""
    found: dict[str, Leaf] = {}
    for section, field in Job.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _of(section, field.annotation)
    return MappingProxyType(_of("megatron", MegatronArgs) | found)


def _of(section: str, model: type[BaseModel]) -> dict[str, Leaf]:
    return {
        name: Leaf(section, name, _shape(field.annotation), field.description or "", field.default, field.is_required())
        for name, field in model.model_fields.items()
        if name not in ALIASES
    }


def _shape(annotation: Any) -> Shape:
    if get_origin(annotation) is Annotated:
        return _shape(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _shape(next(part for part in get_args(annotation) if part is not type(None)))
    if get_origin(annotation) is tuple:
        return Shape.PAIRS if get_origin(get_args(annotation)[0]) is tuple else Shape.MANY
    return Shape.SWITCH if annotation is bool else Shape.ONE
