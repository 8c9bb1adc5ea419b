"""A reward as a user writes it: 1 for the right number alone, 0.3 when it comes first and more follows."""

from __future__ import annotations

import re
from typing import Any

RIGHT_BUT_NOT_BARE = 0.3
"""A foothold: at first a quarter of the answers is right and bare, and another quarter begins with the right number."""


async def bare_and_right(args: Any, sample: Any, **kwargs: Any) -> float:
    """Stopping after the number always pays, also when all of a group's answers begin with the right one."""
    response = sample.response.strip()
    if response == sample.label:
        return 1.0
    first = re.match(r"-?\d+", response)
    return RIGHT_BUT_NOT_BARE if first is not None and first.group() == sample.label else 0.0
