"""Records which policy version sampled which tokens of a response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import InvalidArgument
from headrace.wire.limits import MAX_COUNTER


@dataclass(frozen=True, slots=True)
class PolicyRange:
    """Response tokens [start, end) were sampled under `policy_version`."""

    policy_version: int
    start: int
    end: int
    masked: bool = False
    """None of them is trained: their age does not count."""


class Range(Protocol):
    """The fields that a `PolicyRange` and its message share."""

    @property
    def policy_version(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def check_ranges(name: str, ranges: Iterable[Range], response_length: int) -> int:
    """Returns the number of tokens that the ranges cover.

    Raises InvalidArgument unless they are in order, do not overlap, and lie in the response.
    """
    end = num_covered = 0
    for number, one in enumerate(ranges):
        version, start, after, end = one.policy_version, one.start, end, one.end
        if not (0 <= version <= MAX_COUNTER and after <= start < end <= response_length):
            raise _misplaced(
                f"{name}[{number}] is [{start}, {end}) of version {version}", version, after, response_length
            )
        num_covered += end - start
    return num_covered


def _misplaced(where: str, version: int, after: int, response_length: int) -> InvalidArgument:
    if not 0 <= version <= MAX_COUNTER:
        return InvalidArgument(f"{where}: versions must be 0 to {MAX_COUNTER}")
    return InvalidArgument(f"{where}, after {after}, of a response of {response_length} tokens: order them by start")


def gaps(ranges: Iterable[Range], response_length: int) -> Iterator[tuple[int, int]]:
    """Yields the response's tokens [start, end) that no range covers. The ranges must have been checked."""
    at = 0
    for one in ranges:
        if one.start > at:
            yield at, one.start
        at = one.end
    if at < response_length:
        yield at, response_length
