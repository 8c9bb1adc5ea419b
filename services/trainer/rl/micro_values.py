"""Values of a step's micro-batches from before it is trained: old and reference log-probs, values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headrace.errors import Internal

MicroValues = Sequence[Tensor] | None
"""[B, S] for each micro-batch of a step; None where it is not needed, or not on this rank."""


def at(values: MicroValues, number: int) -> Tensor | None:
    """[B, S] of the micro-batch with this number; None where the step has none."""
    return None if values is None else values[number]


def needed(values: Tensor | None) -> Tensor:
    """The values, for a part of the job that is on only where they are computed: their absence is a bug of ours."""
    if values is None:
        raise Internal("a value that this part of the job trains on was not computed before the step")
    return values
