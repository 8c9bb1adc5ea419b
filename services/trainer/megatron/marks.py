"""Attributes of a parameter that Megatron reads, and that torch's own type does not have."""

from __future__ import annotations

from typing import Any


def mark_sequence_parallel(parameter: Any, is_sequence_parallel: bool) -> None:
    """Its gradient is of this rank's positions alone, and Megatron sums it over the tensor ranks."""
    parameter.sequence_parallel = is_sequence_parallel


def mark_tensor_parallel(parameter: Any, is_shard: bool) -> None:
    """Every tensor rank has another part of it: the gradient norm counts each."""
    parameter.tensor_model_parallel = is_shard
