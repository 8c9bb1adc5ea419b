"""Filling as few bins as may be, and spreading over a number of bins that is given; n log n, for n of thousands."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from services.trainer.plan.partition import partition

# Differencing merges all bins for each item. With many of both, best fit is close to the fewest bins anyway.
_MOST_MERGES = 8192


def longest_first(costs: Sequence[int]) -> list[int]:
    """Indices by descending cost; equal ones as they come."""
    return sorted(range(len(costs)), key=lambda i: -costs[i])


def best_fit(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Lists of indices, each at most `capacity` together; what alone has more is alone.

    Best fit, longest first: each goes where the least room is left behind it (at most 11/9 of the fewest bins; Johnson
    1974, "Fast algorithms for bin packing").
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in longest_first(costs):
        found = bisect_left(rooms, (costs[index], -1))
        if found < len(rooms):
            room, home = rooms.pop(found)
            bins[home].append(index)
        else:
            room, home = capacity, len(bins)
            bins.append([index])
        if room > costs[index]:
            insort(rooms, (room - costs[index], home))
    return bins


def few_bins(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Like `best_fit`, in fewer bins where equal sums (`partition`) fit into fewer."""
    bins = best_fit(costs, capacity)
    alone = [[i] for i, cost in enumerate(costs) if cost > capacity]
    others = [i for i, cost in enumerate(costs) if cost <= capacity]
    fewest = -(-sum(costs[i] for i in others) // capacity)
    while len(bins) - len(alone) > fewest and len(others) * len(bins) <= _MOST_MERGES:
        fewer = partition([costs[i] for i in others], len(bins) - len(alone) - 1)
        if any(sum(costs[others[i]] for i in part) > capacity for part in fewer):
            break
        bins = alone + [[others[i] for i in part] for part in fewer]
    return bins


def fill_in_order(order: Iterable[int], costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of consecutive items of `order`, longest first, for rows in which each item costs as much as the longest."""
    bins: list[list[int]] = []
    slots = 0
    for index in order:
        if not slots:
            slots = max(1, capacity // max(costs[index], 1))
            bins.append([])
        bins[-1].append(index)
        slots -= 1
    return bins


def spread(costs: Sequence[int], num_bins: int, most: int | None = None) -> list[list[int]]:
    """`num_bins` lists of indices with sums about equal, each of `most` at most: longest first, to the least full."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for index in longest_first(costs):
        total, home = heapq.heappop(heap)
        bins[home].append(index)
        if most is None or len(bins[home]) < most:
            heapq.heappush(heap, (total + costs[index], home))
    return bins
