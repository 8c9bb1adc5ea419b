"""What the trainer sends to the engines, in the words of both ends: tensors, and a probe of the new weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.trajectory import pack_column

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4}


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


@dataclass(frozen=True, slots=True)
class Probe:
    """`log_probs` are of all tokens but the first, at temperature 1."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    max_mean_difference: float

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.log_probs) != len(self.tokens) - 1:
            raise InvalidArgument(
                f"a probe of {len(self.tokens)} tokens with {len(self.log_probs)} log-probs: it needs two tokens or "
                "more, and a log-prob for all but the first",
                field="probe",
            )
        if not (math.isfinite(self.max_mean_difference) and self.max_mean_difference > 0):
            raise InvalidArgument(
                f"max_mean_difference is {self.max_mean_difference}, must be above 0",
                field="probe.max_mean_difference",
            )

    def pack(self) -> pb.Probe:
        return pb.Probe(
            tokens=pack_column("tokens", np.asarray(self.tokens, dtype=np.int32)),
            log_probs=pack_column("log_probs", np.asarray(self.log_probs, dtype=np.float32)),
            max_mean_difference=self.max_mean_difference,
        )
