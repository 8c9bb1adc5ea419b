"""Slots that go from caller to caller."""

from __future__ import annotations

import asyncio

import pytest

from headrace.process.workers import FairQueue


async def test_callers_take_turns_and_calls_of_one_caller_keep_their_order() -> None:
    queue = FairQueue(["slot"])
    await queue.take("greedy")
    served = []

    async def call(caller: str, number: int) -> None:
        slot = await queue.take(caller)
        served.append((caller, number))
        queue.give(slot)

    calls = [*(call("greedy", number) for number in range(3)), call("modest", 0)]
    waiting = asyncio.gather(*calls)
    await asyncio.sleep(0)
    assert queue.waiting == 4
    queue.give("slot")
    await waiting
    assert served == [("greedy", 0), ("modest", 0), ("greedy", 1), ("greedy", 2)]
    assert queue.waiting == 0


async def test_a_slot_goes_past_a_caller_that_left_in_the_same_moment_and_is_not_lost() -> None:
    queue = FairQueue(["slot"])
    await queue.take("a")
    gone, after = (asyncio.create_task(queue.take(caller)) for caller in ("b", "c"))
    await asyncio.sleep(0)
    gone.cancel()
    queue.give("slot")
    assert await after == "slot"
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert queue.waiting == 0
    queue.give("slot")
    assert await queue.take("d") == "slot"
