"""How slime cuts one optimizer step where it packs by tokens, from the description at the top of its `dp_schedule`.

Samples go into micro-batches of `capacity` tokens first fit, as they come, over all data ranks at once; a sample that
is longer than `capacity` has a micro-batch of its own. Their number is brought up to a multiple of the data ranks by
splitting the largest that can be split, and every rank gets equally many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.plan.planning import spread


@dataclass(frozen=True, slots=True)
class SlimeCut:
    """What each data rank has to do in slime."""

    micro_batches: int
    """On each rank"""
    busiest_tokens: int
    """Of the rank that has most"""


def slime_cut(lengths: Sequence[int], ranks: int, capacity: int) -> SlimeCut:
    """One step; ranks get work as even as equal numbers of micro-batches allow, which flatters slime a little."""
    bins = first_fit(lengths, capacity)
    while len(bins) % ranks:
        largest = max((held for held in bins if len(held) > 1), key=sum)
        bins.remove(largest)
        bins += [largest[::2], largest[1::2]]
    each = len(bins) // ranks
    work = [sum(held) for held in bins]
    shares = spread(work, ranks, each)
    return SlimeCut(each, max(sum(work[i] for i in share) for share in shares))


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The lengths in each micro-batch: a sample joins the first that has room for it, as samples come."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for length in lengths:
        home = next((i for i, room in enumerate(rooms) if room >= length), None)
        if home is None:
            bins.append([length])
            rooms.append(capacity - length)
        else:
            bins[home].append(length)
            rooms[home] -= length
    return bins
