"""Dividing numbers into parts with sums as equal as may be."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count


def partition(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """`num_parts` lists of indices into `costs`, each in ascending order; the same answer for the same numbers.

    The largest differencing method (Karmarkar and Karp 1982): the two partial partitions that are most uneven are laid
    upon each other, the heaviest part of one on the lightest of the other, until one is left. The library for it on
    PyPI (numberpartitioning) has not moved since 2021.
    """
    tie = count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, cost in enumerate(costs):
        parts: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_parts - 1)]
        heap.append((-cost, next(tie), [*parts, (cost, [index])]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = sorted(
            ((a + b, mine + theirs) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)),
            key=lambda part: part[0],
        )
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], next(tie), merged))
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]
