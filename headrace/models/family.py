"""What a family says of itself; headrace.models.registry lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.config.architecture import Architecture
from headrace.models.blocks import decoder
from headrace.models.rows import Table


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model: the values of its config.json, its size, and a layout to start from."""

    name: str
    config: Mapping[str, Any]
    published_parameters: float
    layout: Mapping[str, int]
    """Megatron's parallel sizes. Arithmetic for GPUs with 80 GB, not run."""


@dataclass(frozen=True, slots=True)
class Family:
    """Everything that headrace must know about a family, as data and two functions."""

    model_types: Sequence[str]
    """config.json's model_type."""
    read: Callable[[Mapping[str, Any]], Architecture]
    """From a config.json; raises ConfigError for what headrace cannot do."""
    table: Callable[[Architecture], Table] = decoder
    presets: Sequence[Preset] = field(default=())
