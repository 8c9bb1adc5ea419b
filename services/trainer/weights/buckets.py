"""Cutting a model's tensors into buckets that travel one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.wire.tensor_spec import TensorSpec
from services.trainer.weights.engine_layout import travel_together

_FEWEST = 16
_SMALLEST_BYTES = 64 << 20


def filling_bytes(specs: Sequence[TensorSpec], limit_bytes: int) -> int:
    """The size at which buckets keep gathering, sending and loading busy at once: many buckets, none of them small.

    A bucket costs each engine a call; sending it takes some 0.1 s at the smallest size.
    """
    return min(limit_bytes, max(_SMALLEST_BYTES, sum(spec.num_bytes for spec in specs) // _FEWEST))


def cut(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors, at most `bucket_bytes` to a bucket.

    A larger one travels alone; tensors that an engine fuses only when it gets both at once travel together.
    """
    buckets: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        is_full = not buckets or filled + spec.num_bytes > bucket_bytes
        if is_full and not (buckets and travel_together(buckets[-1][-1].name, spec.name)):
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += spec.num_bytes
    return buckets
