"""Places that go from caller to caller."""

from __future__ import annotations

import asyncio

import pytest

from headrace.process.workers.turns import Turns


async def test_a_place_goes_past_a_caller_that_left_in_the_same_moment_and_is_not_lost() -> None:
    turns: Turns[str] = Turns(["place"], None)
    await turns.take(("a", 1))
    gone, after = (asyncio.create_task(turns.take(caller)) for caller in (("b", 2), ("c", 3)))
    await asyncio.sleep(0)
    gone.cancel()
    turns.give(("a", 1), "place")
    assert await after == "place"
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert turns.waiting == 0
    turns.give(("c", 3), "place")
    assert await turns.take(("d", 4)) == "place"
