"""The short sequence that every engine is asked about after a publication, before its weights are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.trajectory import Sample, Status, pack_column

LENGTH = 16
_STRIDE = 7919  # a prime: ids from all over the vocabulary


@dataclass(frozen=True, slots=True)
class Canary:
    """`log_probs` are of all tokens but the first, at temperature 1."""

    tokens: Sequence[int]
    log_probs: Sequence[float]

    def pack(self, max_mean_difference: float) -> pb.Canary:
        """The message for rollout; `max_mean_difference` is how far an engine's log-probs may be apart on average."""
        return pb.Canary(
            tokens=pack_column("tokens", np.asarray(self.tokens, dtype=np.int32)),
            log_probs=pack_column("log_probs", np.asarray(self.log_probs, dtype=np.float32)),
            max_mean_difference=max_mean_difference,
        )


def canary_sample(vocab_size: int) -> Sample:
    """One token of prompt, the others as its response."""
    tokens = np.arange(1, LENGTH + 1, dtype=np.int64) * _STRIDE % vocab_size
    return Sample(
        sample_id="canary",
        group_id="canary",
        index=0,
        prompt="",
        response="",
        tokens=tokens.astype(np.int32),
        loss_mask=np.ones(LENGTH - 1, dtype=np.uint8),
        rollout_log_probs=np.zeros(LENGTH - 1, dtype=np.float32),
        status=Status.COMPLETED,
    )
