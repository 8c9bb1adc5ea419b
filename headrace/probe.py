"""A short sequence with log-probs that the trainer knows: an engine must compute the same with its new weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.wire.column import pack_column


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
