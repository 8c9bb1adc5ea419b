"""Numbers that users' functions report under names of their own, added up over ranks that do not know the names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from services.trainer.megatron.gathered import gathered
from services.trainer.megatron.parallel import Layout


def summed_by_name(mine: Mapping[str, float], layout: Layout) -> dict[str, float]:
    """Collective over all ranks: the sum under each name that any rank has."""
    found: dict[str, float] = defaultdict(float)
    for each in gathered(dict(mine), layout):
        for name, value in each.items():
            found[name] += value
    return dict(sorted(found.items()))
