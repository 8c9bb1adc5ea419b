"""Describes the engine in each slot of a fleet, by its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """`group` is the name of the job's engine group; empty where it has none."""

    tensor_parallel_size: int
    group: str = ""


SlotOf = Callable[[int], EngineSlot]
"""The slot with a number."""


def alike(tensor_parallel_size: int) -> SlotOf:
    """Slots that are all the same."""
    slot = EngineSlot(tensor_parallel_size)
    return lambda _: slot
