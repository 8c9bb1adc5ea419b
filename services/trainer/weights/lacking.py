"""The engines that lack the weights that should be served."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lacking:
    """Either the whole fleet serves another version, or some engines came back without the served one, or nobody."""

    everybody: bool = False
    engine_ids: tuple[str, ...] = ()


EVERYBODY = Lacking(everybody=True)
NOBODY = Lacking()
