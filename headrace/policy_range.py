"""Which weights sampled which tokens of a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


def check_ranges(name: str, ranges: Sequence[PolicyRange], response_length: int) -> None:
    """Raises InvalidArgument unless they are in order, do not overlap, and lie in the response."""
    end = 0
    for number, one in enumerate(ranges):
        where = f"{name}[{number}] is [{one.start}, {one.end}) of version {one.policy_version}"
        if not 0 <= one.policy_version <= MAX_COUNTER:
            raise InvalidArgument(f"{where}: versions are 0 to {MAX_COUNTER}")
        if not end <= one.start < one.end <= response_length:
            raise InvalidArgument(
                f"{where}, after {end}, of a response of {response_length} tokens: order them by start"
            )
        end = one.end


def gaps(ranges: Sequence[PolicyRange], response_length: int) -> Iterator[tuple[int, int]]:
    """[start, end) of the response's tokens that no range covers. The ranges were checked."""
    at = 0
    for one in ranges:
        if one.start > at:
            yield at, one.start
        at = one.end
    if at < response_length:
        yield at, response_length


def check_covered(name: str, ranges: Sequence[PolicyRange], response_length: int) -> None:
    """Raises InvalidArgument where a token has no version: an engine sampled every one of them."""
    for start, end in gaps(ranges, response_length):
        raise InvalidArgument(f"{name} say nothing of the response's tokens [{start}, {end})")
