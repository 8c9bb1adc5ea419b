"""Points of a picture: of a million steps no more than of a thousand, in memory, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_POINTS = 500
"""A picture is some 1,300 pixels wide."""
_MOST_MARKS = 20
"""Of one point: a run that restarts all the time would fill the memory otherwise."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What changed before a step: a restart, with the options that it changed, or another scorer."""

    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """Neighbouring rows of the report: how many they are, from which step to which, and their metrics."""

    first: int
    last: int
    num_rows: int
    sums: Mapping[str, float]
    nums: Mapping[str, int]
    """How many of the rows have the metric."""
    times: Sequence[float] = ()
    """When the first and the last of them came, in seconds since 1970; empty where nobody knows."""
    marks: Sequence[Mark] = ()

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, float], time: float | None = None, marks: Sequence[str] = ()) -> Point:
        """The point of one row."""
        times = () if time is None else (time, time)
        return cls(step, step, 1, metrics, dict.fromkeys(metrics, 1), times, [Mark(step, text) for text in marks])

    @property
    def step(self) -> float:
        """The middle of its steps."""
        return (self.first + self.last) / 2

    def __contains__(self, metric: str) -> bool:
        return metric in self.sums

    def mean(self, metric: str) -> float:
        """Returns its mean over the rows that have it."""
        return self.sums[metric] / self.nums[metric]

    def joined(self, later: Point) -> Point:
        """This one's rows and those of the next."""
        sums = dict(self.sums)
        for name, value in later.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        nums = dict(Counter(self.nums) + Counter(later.nums))
        first, last = min(self.first, later.first), max(self.last, later.last)
        times = [*self.times, *later.times]
        times = [min(times), max(times)] if times else []
        marks = [*self.marks, *later.marks][-_MOST_MARKS:]
        return Point(first, last, self.num_rows + later.num_rows, sums, nums, times, marks)


class Points:
    """Keeps at most `most` points of all rows so far: when there would be more, neighbours are joined.

    All have the same number of rows, but for the last, which may have fewer.
    """

    def __init__(self, metrics: Sequence[str], most: int = MOST_POINTS) -> None:
        """`metrics` are what the names of metrics begin with; others are left out, and so are rows without any."""
        self._starts = tuple(metrics)
        self._most = most
        self._points: list[Point] = []
        self._rows_per_point = 1

    def add(
        self, step: int, metrics: Mapping[str, float], time: float | None = None, marks: Sequence[str] = ()
    ) -> None:
        """Adds a row, or joins it to the last point."""
        found = {name: value for name, value in metrics.items() if name.startswith(self._starts)}
        if not found:
            return
        point = Point.of(step, found, time, marks)
        if self._points and self._points[-1].num_rows < self._rows_per_point:
            self._points[-1] = self._points[-1].joined(point)
            return
        self._points.append(point)
        if len(self._points) > self._most:
            self._halve()

    def all(self) -> list[Point]:
        """Returns them in the order of their rows."""
        return list(self._points)

    def _halve(self) -> None:
        pairs = (self._points[i : i + 2] for i in range(0, len(self._points), 2))
        self._points = [pair[0].joined(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
        self._rows_per_point *= 2
