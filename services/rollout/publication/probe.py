"""A short sequence with log-probs that the trainer knows: an engine must compute the same with its new weights.

Checksums say that the bytes arrived; the probe says that both sides compute the same model (rotary base, norms, dtype).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ChecksumMismatch, InvalidArgument
from services.rollout.engine.client import EngineClient


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
                field="canary",
            )
        if not (math.isfinite(self.max_mean_difference) and self.max_mean_difference > 0):
            raise InvalidArgument(
                f"max_mean_difference is {self.max_mean_difference}, must be above 0",
                field="canary.max_mean_difference",
            )

    async def ask(self, engine: EngineClient, policy_version: int, *, seconds: float) -> None:
        """Raises ChecksumMismatch with both sides' numbers when the engine disagrees."""
        theirs = await engine.score(self.tokens, cache_key=f"probe-{policy_version}", seconds=seconds)
        difference = sum(abs(a - b) for a, b in zip(self.log_probs, theirs, strict=True)) / len(theirs)
        if not difference <= self.max_mean_difference:  # NaN disagrees too
            raise ChecksumMismatch(
                f"the probe's log-probs differ by {difference:.4g} in the mean, more than "
                f"{self.max_mean_difference:g}: trainer {_first(self.log_probs)} …, engine {_first(theirs)} …"
            )


def _first(log_probs: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in log_probs[:3])
