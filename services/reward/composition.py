"""A reward of several parts: weights, gates, clips, and which rows a part scores. Pure.

The parts that count are added up, or the smallest or largest of them is the reward. A gate is scored first: below it
the reward is 0, and no other part is asked. A part that abstains, or scores other rows, is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.limits import canonical

Combine = Literal["sum", "min", "max"]


@dataclass(frozen=True, slots=True)
class Part:
    """`label` names it in the sample's parts of the reward. A `weight` of 0: it does not count, and may be a gate."""

    label: str
    weight: float = 1.0
    gate: float | None = None
    """The reward is 0 where the part is less."""
    clip: tuple[float, float] | None = None
    when: Mapping[str, Any] | None = None
    """Entries of a row's metadata, each a value or a list of values: the rows that the part scores. None: all."""

    def scores(self, metadata: Mapping[str, Any]) -> bool:
        return all(
            metadata.get(key) in wanted if isinstance(wanted, list) else metadata.get(key) == wanted
            for key, wanted in (self.when or {}).items()
        )

    def clipped(self, value: float) -> float:
        return clipped(value, self.clip)


def clipped(value: float, clip: tuple[float, float] | None) -> float:
    return value if clip is None else min(max(value, clip[0]), clip[1])


def is_passed(parts: Sequence[Part], values: Mapping[str, float]) -> bool:
    """True where no gate is closed. `values` are those of the gates, by label."""
    return all(part.gate is None or values.get(part.label, part.gate) >= part.gate for part in parts)


_COMBINES: Mapping[Combine, Callable[[Sequence[float]], float]] = {"sum": sum, "min": min, "max": max}


def combined(
    parts: Sequence[Part], values: Mapping[str, float], combine: Combine, clip: tuple[float, float] | None = None
) -> float | None:
    """The reward of clipped values by label; None where no part that counts has one: the composition abstains."""
    if not is_passed(parts, values):
        return 0.0
    terms = [part.weight * values[part.label] for part in parts if part.weight and part.label in values]
    if not terms:
        return None
    return clipped(_COMBINES[combine](terms), clip)


def digest_of(settings: Any) -> str:
    """The first 12 hexadecimal digits of the settings' SHA-256: equal for equal settings."""
    return f"sha256:{hashlib.sha256(canonical(settings).encode()).hexdigest()[:12]}"
