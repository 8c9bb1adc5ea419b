"""The engines that lack the weights that should be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EngineIds = Mapping[int, Sequence[str]]
"""Engines by the number of their rollout service; none: all of that service's."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """Either all fleets serve another version, or some engines came back without the served one, or nobody."""

    everybody: bool = False
    engine_ids: EngineIds = field(default_factory=dict)


EVERYBODY = Lacking(everybody=True)
NOBODY = Lacking()
