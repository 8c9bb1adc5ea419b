"""The metrics of a step, or of an evaluation, as one row of the report."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The metrics of one step or evaluation, and when they came (seconds since 1970)."""

    step: int
    time: float
    metrics: Mapping[str, float]
    warnings: Sequence[str] = ()
    """Sentences for a person."""


class PackedMetrics(Mapping[str, float]):
    """Numbers in a fifth of a dict's memory, for a trainer that keeps all rows; rows of the same names share them."""

    __slots__ = ("_places", "_values")

    def __init__(self, places: Mapping[str, int], values: array[float]) -> None:
        self._places = places
        self._values = values

    def __getitem__(self, name: str) -> float:
        return self._values[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Packer:
    """Packs rows of one report."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], Mapping[str, int]] = {}

    def packed(self, metrics: Mapping[str, float]) -> PackedMetrics:
        """The same names and numbers, in the same order."""
        names = tuple(metrics)
        places = self._places.setdefault(names, {name: i for i, name in enumerate(names)})
        return PackedMetrics(places, array("d", metrics.values()))
