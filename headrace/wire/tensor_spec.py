"""A tensor as the trainer sends it to the engines, in the words of both ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.api.rollout.v1 import rollout_pb2 as pb

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as it travels: its name in the Hugging Face checkpoint, shape and dtype."""

    name: str
    shape: Sequence[int]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def pack(self, bucket: int) -> pb.TensorSpec:
        return pb.TensorSpec(name=self.name, shape=self.shape, dtype=self.dtype, bucket=bucket)
