"""Megatron-core's configs from a job's arguments, and the attributes that it reads from parameters.

What differs between Megatron-core's versions is here and nowhere else. Written against 0.16.1 (Python 3.11) and 0.19.2
(Python 3.12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from megatron.core.transformer.enums import AttnBackend

from headrace.errors import ConfigError
from headrace.job.megatron import ARCHITECTURAL, OPTIMIZER_ON_GPU, MegatronArgs

C = TypeVar("C")

_TUPLES = frozenset({"window_size", "param_name_patterns_for_fp32_local_accumulation"})


def made(config: type[C], args: MegatronArgs, values: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> C:
    """The config with `values`, over them the arguments of the same names, over both `fixed`.

    Raises ConfigError with Megatron's own words when it refuses a combination.
    """
    known = frozenset(field.name for field in fields(config))  # type: ignore[arg-type]  # untyped dataclasses
    left_out = ARCHITECTURAL if torch.cuda.is_available() else ARCHITECTURAL | OPTIMIZER_ON_GPU
    arguments = args.model_dump(include=set(known - left_out), exclude_none=True)
    given = {name: _as_megatron(name, value) for name, value in arguments.items()}
    try:
        return config(**({**values} | given | {**(fixed or {})}))
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"Megatron-core refuses this {config.__name__}: {error}") from error


def _as_megatron(name: str, value: Any) -> Any:
    if name == "attention_backend":
        return AttnBackend[value]
    if name.endswith("_dtype") and name not in ("moe_router_dtype",):
        return getattr(torch, value)
    if isinstance(value, tuple) and name not in _TUPLES:
        return list(value)
    return value


def mark_sequence_parallel(parameter: Any, is_sequence_parallel: bool) -> None:
    """Its gradient is of this rank's positions alone, and Megatron sums it over the tensor ranks."""
    parameter.sequence_parallel = is_sequence_parallel


def mark_tensor_parallel(parameter: Any, is_shard: bool) -> None:
    """Every tensor rank has another part of it: the gradient norm counts each."""
    parameter.tensor_model_parallel = is_shard


def mark_like_expert(parameter: Any, weight: Any) -> None:
    """Its gradient is reduced over the same ranks: those that have the same expert, or all data ranks."""
    # Transformer Engine's layer with a norm has no such attribute, and no expert has that layer.
    parameter.allreduce = getattr(weight, "allreduce", True)
