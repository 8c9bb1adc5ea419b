"""What the engine in each slot of a fleet is, by its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """`group` is the name of the job's engine group; empty where it has none."""

    tensor_parallel_size: int
    group: str = ""


SlotOf = Callable[[int], Slot]
"""The slot with a number."""


def alike(tensor_parallel_size: int) -> SlotOf:
    """Slots that are all the same."""
    slot = Slot(tensor_parallel_size)
    return lambda _: slot
