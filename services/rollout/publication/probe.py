"""Asks an engine for a probe's log-probs under its new weights.

Checksums say that the bytes arrived; the probe says that both sides compute the same model (rotary base, norms, dtype).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import ChecksumMismatch
from headrace.probe import Probe
from services.rollout.engine.client import EngineClient


async def ask(probe: Probe, engine: EngineClient, policy_version: int, *, seconds: float) -> None:
    """Raises ChecksumMismatch with both sides' numbers when the engine disagrees."""
    theirs = await engine.score(probe.tokens, cache_key=f"probe-{policy_version}", seconds=seconds)
    difference = sum(abs(a - b) for a, b in zip(probe.log_probs, theirs, strict=True)) / len(theirs)
    if not difference <= probe.max_mean_difference:  # NaN disagrees too
        raise ChecksumMismatch(
            f"the probe's log-probs differ by {difference:.4g} in the mean, more than "
            f"{probe.max_mean_difference:g}: trainer {_first(probe.log_probs)} …, engine {_first(theirs)} …"
        )


def _first(log_probs: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in log_probs[:3])
