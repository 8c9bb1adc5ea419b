"""Points of a curve as a picture can show them: of a million steps no more than of a thousand."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_POINTS = 500
"""A picture is some 1,300 pixels wide."""


def averaged(values: Sequence[float], most: int = MOST_POINTS) -> list[float]:
    """At most `most` numbers, each the mean of neighbours; sequences of one length stay of one length."""
    size = max(1, math.ceil(len(values) / most))
    parts = (values[start : start + size] for start in range(0, len(values), size))
    return [math.fsum(part) / len(part) for part in parts]
