"""What a shadow scorer said beside the one that paid: a file in the run's folder, and what can be read from it.

The reward service writes a line for each sample that both have scored; `headrace reward diff` reads them.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from headrace.errors import NotFound

_MOST_BYTES = 32 << 20
_QUARTERS = 4
_LEAST_FOR_CORRELATION = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """One sample and its two rewards. Versions are as in the sample's own `scorer_version`."""

    sample_id: str
    group_id: str
    response_tokens: int
    live: str
    live_version: str
    live_reward: float
    shadow: str
    shadow_version: str
    shadow_reward: float

    @property
    def difference(self) -> float:
        return self.shadow_reward - self.live_reward


_LINE = TypeAdapter(Comparison)


def as_line(comparison: Comparison) -> str:
    """JSON, without a line's end."""
    return _LINE.dump_json(comparison).decode()


def of_line(line: bytes) -> Comparison | None:
    """None for a line that is none."""
    try:
        return _LINE.validate_json(line)
    except ValidationError:
        return None


class ShadowLog:
    """Two files, the older one full: together they hold the latest comparisons."""

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES) -> None:
        self.path = path
        self._older = path.with_suffix(".1.jsonl")
        self._most_bytes = most_bytes

    def append(self, comparisons: Sequence[Comparison]) -> None:
        """Raises OSError as the disk does."""
        with self.path.open("ab") as file:
            file.write("".join(f"{as_line(each)}\n" for each in comparisons).encode())
            is_full = file.tell() > self._most_bytes // 2
        if is_full:
            self.path.replace(self._older)

    def all(self) -> Iterator[Comparison]:
        """Yields them, oldest first, each sample once for a pair of scorers. Torn lines are skipped."""
        seen = set[tuple[str, str, str]]()
        for line in self._lines():
            if (found := of_line(line)) is None:
                continue
            key = (found.sample_id, found.live_version, found.shadow_version)
            if key not in seen:
                seen.add(key)
                yield found

    def _lines(self) -> Iterator[bytes]:
        for file in (self._older, self.path):
            if file.is_file():
                with file.open("rb") as lines:
                    yield from lines

    def latest_pair(self) -> list[Comparison]:
        """The comparisons of the two scorers that were compared last. Raises NotFound without any."""
        found = list(self.all())
        if not found:
            raise NotFound(f"{self.path} has no comparison: `headrace reward shadow SCORER` starts them")
        last = found[-1]
        pair = (last.live_version, last.shadow_version)
        return [each for each in found if (each.live_version, each.shadow_version) == pair]


@dataclass(frozen=True, slots=True)
class LengthQuarter:
    """A quarter of the samples by the length of their responses, in tokens."""

    shortest: int
    longest: int
    samples: int
    live_mean: float
    shadow_mean: float

    @property
    def difference(self) -> float:
        return self.shadow_mean - self.live_mean


@dataclass(frozen=True, slots=True)
class Difference:
    """How two scorers differ on the same samples. A correlation is None where one of them gives all the same reward."""

    samples: int
    equal: int
    live_mean: float
    shadow_mean: float
    pearson: float | None
    spearman: float | None
    by_length: Sequence[LengthQuarter]
    furthest: Sequence[Comparison]
    """The samples that differ most, the largest difference first."""

    @classmethod
    def of(cls, comparisons: Sequence[Comparison], num_furthest: int = 5) -> Difference:
        """Of at least one."""
        live = [each.live_reward for each in comparisons]
        shadow = [each.shadow_reward for each in comparisons]
        ordered = sorted(comparisons, key=lambda each: -abs(each.difference))
        return cls(
            samples=len(comparisons),
            equal=sum(is_equal(each.live_reward, each.shadow_reward) for each in comparisons),
            live_mean=statistics.fmean(live),
            shadow_mean=statistics.fmean(shadow),
            pearson=_correlation(live, shadow),
            spearman=_correlation(_ranks(live), _ranks(shadow)),
            by_length=list(_by_length(comparisons)),
            furthest=[each for each in ordered[:num_furthest] if not is_equal(each.live_reward, each.shadow_reward)],
        )


def is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    if len(x) < _LEAST_FOR_CORRELATION or len(set(x)) == 1 or len(set(y)) == 1:
        return None
    return statistics.correlation(x, y)


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in order[start : end + 1]:
            ranks[position] = (start + end) / 2
        start = end + 1
    return ranks


def _by_length(comparisons: Iterable[Comparison]) -> Iterator[LengthQuarter]:
    """Equal lengths are in one quarter, so that quarters may differ in size, or be fewer."""
    ordered = sorted(comparisons, key=lambda each: each.response_tokens)
    lengths = [each.response_tokens for each in ordered]
    start = 0
    for quarter in range(1, _QUARTERS + 1):
        last = len(ordered) * quarter // _QUARTERS - 1
        end = bisect_right(lengths, lengths[max(last, 0)])
        if part := ordered[start:end]:
            start = end
            yield LengthQuarter(
                part[0].response_tokens,
                part[-1].response_tokens,
                len(part),
                statistics.fmean(each.live_reward for each in part),
                statistics.fmean(each.shadow_reward for each in part),
            )
