"""The interface of a model family; headrace.models.registry lists the families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.models.architecture import Architecture
from headrace.models.blocks import decoder
from headrace.models.rows import Table

SHARED_OPTIMIZER: Mapping[str, int] = {"use_distributed_optimizer": True}
"""What is not an expert is on every expert rank, its optimizer states then only once."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model: the values of its config.json, its size, and a layout to start from."""

    name: str
    config: Mapping[str, Any]
    published_parameters: float
    layout: Mapping[str, int]
    """Megatron's arguments of that. Arithmetic for bfloat16 on GPUs with 80 GB, not run."""


@dataclass(frozen=True, slots=True)
class Family:
    """Everything that headrace must know about a family, as data and two functions."""

    model_types: Sequence[str]
    """config.json's model_type."""
    read: Callable[[Mapping[str, Any]], Architecture]
    """Reads a config.json; raises ConfigError for what headrace cannot do."""
    table: Callable[[Architecture], Table] = decoder
    presets: Sequence[Preset] = field(default=())
