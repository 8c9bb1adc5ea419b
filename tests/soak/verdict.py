"""Whether a line grows: the median of all its slopes (Theil-Sen), which single outliers do not move.

Only the second half counts: caches, pools and allocators fill in the first. A line grows when it gains more than its
bound in an hour, even by the lower end of the slopes' confidence interval, and more than its noise in the time seen.
That it was steeper before is no excuse: a leak may slow down as its process does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_MOST_POINTS = 300
"""Slopes are those of all pairs."""
_Z = 2.58
"""99 of 100 intervals have the true slope."""
_LEAST_POINTS = 8


@dataclass(frozen=True, slots=True)
class Bound:
    """`an_hour` is how much a line may gain; less than `at_all` plus a share of its median is noise."""

    an_hour: float
    at_all: float
    share: float = 0.0


MIB = 1 << 20
BOUNDS: Mapping[str, Bound] = {
    "memory": Bound(an_hour=8 * MIB, at_all=4 * MIB, share=0.02),
    "descriptors": Bound(an_hour=2.0, at_all=4.0),
    "threads": Bound(an_hour=1.0, at_all=2.0),
    "disk": Bound(an_hour=8 * MIB, at_all=2 * MIB, share=0.05),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Slopes are in units an hour."""

    slope: float
    least_slope: float
    level: float
    """The median of the second half."""
    grows: bool


def judge(points: Sequence[tuple[float, float]], bound: Bound) -> Verdict | None:
    """`points` are (seconds, value). None where the second half has too few to say anything."""
    half = second_half(points)
    if len(half) < _LEAST_POINTS:
        return None
    slopes = sorted(_slopes(half))
    slope, level = median(slopes), median(value for _, value in half)
    least = slopes[max(0, round((len(slopes) - _Z * _deviation(len(half))) / 2) - 1)]
    hours = (half[-1][0] - half[0][0]) / 3600
    grows = least > bound.an_hour and slope * hours > bound.at_all + bound.share * level
    return Verdict(slope, least, level, grows)


def second_half(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """By time, and thinned to what can be compared pair by pair."""
    if not points:
        return ()
    middle = (points[0][0] + points[-1][0]) / 2
    half = [point for point in points if point[0] >= middle]
    return half[:: math.ceil(len(half) / _MOST_POINTS)]


def _slopes(points: Sequence[tuple[float, float]]) -> list[float]:
    """An hour, of all pairs."""
    pairs = ((one, later) for i, one in enumerate(points) for later in points[i + 1 :] if later[0] > one[0])
    return [(later[1] - one[1]) / (later[0] - one[0]) * 3600 for one, later in pairs]


def _deviation(count: int) -> float:
    """Of Kendall's S for as many points as these (Sen 1968)."""
    return math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
