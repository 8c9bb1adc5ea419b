"""Every option of a job with the number of words that it takes. Flags, variables and keys are derived from it."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from headrace.job.megatron import MegatronArgs
from headrace.job.names import MEGATRON, SLIME
from headrace.job.schema.job import Job
from headrace.job.schema.section import Section

ALIASES: Mapping[str, str] = {**SLIME["aliases"], **MEGATRON["aliases"]}
"""Other names of options: slime's, Megatron's, and views."""

OPPOSITES: Mapping[str, str] = {"grad_reduce_in_bf16": "grad_reduce_in_fp32"}
"""Switches of Megatron's script that turn an option off."""


class Arity(Enum):
    """The number of words that a flag takes."""

    SWITCH = "switch"
    ONE = "one"
    MANY = "many"
    PAIRS = "pairs"


@dataclass(frozen=True, slots=True)
class Option:
    section: str
    name: str
    arity: Arity
    model: type[BaseModel]
    """The class of its section."""
    default: Any
    required: bool

    @property
    def description(self) -> str:
        return _texts(self.model).get(self.name, "")

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
def options() -> Mapping[str, Option]:
    """Every option by name, Megatron's included; aliases are not in it."""
    found: dict[str, Option] = {}
    for section, field in Job.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _of(section, field.annotation)
    return MappingProxyType(_of("megatron", MegatronArgs) | found)


def _of(section: str, model: type[BaseModel]) -> dict[str, Option]:
    return {
        name: Option(section, name, _arity(field.annotation), model, field.default, field.is_required())
        for name, field in model.model_fields.items()
        if name not in ALIASES
    }


@cache
def _texts(model: type[BaseModel]) -> Mapping[str, str]:
    """The texts below a section's fields, and Megatron's own descriptions.

    Read from the source when somebody asks, which a run never does.
    """
    found = {name: field.description for name, field in model.model_fields.items() if field.description}
    for each in (cls for cls in reversed(model.__mro__) if issubclass(cls, Section) and cls is not Section):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in pairwise(tree.body):
            match field, below:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found


def _arity(annotation: Any) -> Arity:
    if get_origin(annotation) is Annotated:
        return _arity(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _arity(next(part for part in get_args(annotation) if part is not type(None)))
    if get_origin(annotation) is tuple:
        return Arity.PAIRS if get_origin(get_args(annotation)[0]) is tuple else Arity.MANY
    return Arity.SWITCH if annotation is bool else Arity.ONE
