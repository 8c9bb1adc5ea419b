"""Waits of one client share a few calls; everyone who waits still has an answer, an error and an end of its own."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import LOOKING_AT_ONCE, WAITING_AT_ONCE, BufferClient, SharedWaits
from headrace.errors import DeadlineExceeded
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import served_buffer

NUM_WAITERS = 100
_ENOUGH_SECONDS = 60.0


class Shelf:
    """A server in small: things are put on it, and a caller takes one or waits for it."""

    def __init__(self) -> None:
        self.things: deque[int] = deque()
        self.num_waiting = 0
        self.most_waiting = 0
        self._changed = asyncio.Condition()

    async def put(self, thing: int) -> None:
        async with self._changed:
            self.things.append(thing)
            self._changed.notify_all()

    async def take(self, wait_seconds: float, deadline_seconds: float) -> int | None:
        assert deadline_seconds >= 0
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        try:
            async with asyncio.timeout(wait_seconds), self._changed:
                await self._changed.wait_for(lambda: self.things)
                return self.things.popleft()
        except TimeoutError:
            return self.things.popleft() if self.things else None
        finally:
            self.num_waiting -= 1


async def passed() -> None:
    """Lets every task that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_few_of_many_waiters_call_and_each_gets_what_comes() -> None:
    shelf, shared = Shelf(), SharedWaits()
    waiters = [asyncio.create_task(shared.ask("all", shelf.take, _ENOUGH_SECONDS, 1.0)) for _ in range(NUM_WAITERS)]
    await passed()
    assert shelf.num_waiting == WAITING_AT_ONCE
    for thing in range(NUM_WAITERS):
        await shelf.put(thing)
    assert sorted(await asyncio.gather(*waiters)) == list(range(NUM_WAITERS))
    assert shelf.most_waiting == WAITING_AT_ONCE


async def test_waits_for_other_things_do_not_stand_in_one_queue() -> None:
    shelf, other, shared = Shelf(), Shelf(), SharedWaits()
    waiters = [asyncio.create_task(shared.ask("all", shelf.take, _ENOUGH_SECONDS, 1.0)) for _ in range(NUM_WAITERS)]
    await passed()
    await other.put(1)
    assert await shared.ask("other", other.take, _ENOUGH_SECONDS, 1.0) == 1
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    assert shelf.num_waiting == 0


async def test_a_wait_that_ends_in_the_queue_still_asks_once() -> None:
    shelf, shared = Shelf(), SharedWaits()
    heads = [
        asyncio.create_task(shared.ask("all", never_answered, _ENOUGH_SECONDS, 1.0)) for _ in range(WAITING_AT_ONCE)
    ]
    await passed()
    await shelf.put(7)
    waited: list[float] = []

    async def take(wait_seconds: float, deadline_seconds: float) -> int | None:
        waited.append(wait_seconds)
        return await shelf.take(wait_seconds, deadline_seconds)

    assert await shared.ask("all", take, 0.01, 1.0) == 7, "those at the head do not see it"
    assert waited == [0.0], "its time is over"
    for head in heads:
        head.cancel()


async def test_all_who_wait_in_the_queue_until_their_end_are_told_that_nothing_came() -> None:
    shelf, shared = Shelf(), SharedWaits()
    heads = [
        asyncio.create_task(shared.ask("all", never_answered, _ENOUGH_SECONDS, 1.0)) for _ in range(WAITING_AT_ONCE)
    ]
    await passed()
    waits = [shared.ask("all", shelf.take, 0.01, 1.0) for _ in range(4 * LOOKING_AT_ONCE)]
    assert set(await asyncio.gather(*waits)) == {None}
    for head in heads:
        head.cancel()


async def never_answered(wait_seconds: float, deadline_seconds: float) -> None:
    """A call that no server answers."""
    await asyncio.Event().wait()


async def test_every_waiter_has_its_deadline_where_no_call_is_answered() -> None:
    async def hang(wait_seconds: float, deadline_seconds: float) -> None:
        await asyncio.sleep(wait_seconds + deadline_seconds)
        raise DeadlineExceeded("no answer")

    shared = SharedWaits()
    waits = [shared.ask("all", hang, 0.01, 0.05) for _ in range(4 * LOOKING_AT_ONCE)]
    async with asyncio.timeout(_ENOUGH_SECONDS):
        errors = await asyncio.gather(*waits, return_exceptions=True)
    assert {type(error) for error in errors} == {DeadlineExceeded}


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
async def test_no_wait_and_no_number_go_to_the_server_as_they_are(seconds: float) -> None:
    shared, asked = SharedWaits(), list[float]()
    calls = [shared.ask("all", never_answered, _ENOUGH_SECONDS, 1.0) for _ in range(WAITING_AT_ONCE)]
    heads = [asyncio.create_task(call) for call in calls]
    await passed()

    async def ask(wait_seconds: float, deadline_seconds: float) -> None:
        asked.append(wait_seconds)

    async with asyncio.timeout(_ENOUGH_SECONDS):
        await shared.ask("all", ask, seconds, 1.0)
    assert asked == [pytest.approx(seconds, nan_ok=True)]
    for head in heads:
        head.cancel()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_whatever_comes_goes_or_leaves_nobody_sleeps_while_something_is_there(seed: int) -> None:
    asyncio.run(_random_waiters(random.Random(seed)))


async def _random_waiters(draw: random.Random) -> None:
    shelf, shared, waiters, num_put = Shelf(), SharedWaits(), set[asyncio.Task[int | None]](), 0
    for _ in range(60):
        for _ in range(draw.randrange(6)):
            seconds = draw.choice([_ENOUGH_SECONDS, _ENOUGH_SECONDS, 0.0001])
            waiters.add(asyncio.create_task(shared.ask(draw.randrange(2), shelf.take, seconds, _ENOUGH_SECONDS)))
        for waiter in draw.sample(sorted(waiters, key=id), min(len(waiters), draw.randrange(4))):
            waiter.cancel()
        for _ in range(draw.randrange(4)):
            num_put += 1
            await shelf.put(num_put)
        if draw.random() < 0.3:
            await asyncio.sleep(0)
        if draw.random() < 0.1:
            await asyncio.sleep(0.0002)
    await asyncio.sleep(0.001)
    await passed()
    await passed()
    left = [waiter for waiter in waiters if not waiter.done()]
    assert not (left and shelf.things), "someone sleeps through what is there"
    assert shelf.num_waiting >= min(len(left), WAITING_AT_ONCE)
    for waiter in left:
        waiter.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert shelf.num_waiting == 0


# With buffers


async def test_a_request_that_was_granted_is_answered_before_those_who_wait() -> None:
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as buffer:
        await buffer.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=1, groups_per_step=2))
        await buffer.submit_prompts("train", text_prompts("q"))
        granted = await buffer.lease_groups("train", "p", 1, request_id="r")
        waits = [buffer.lease_groups("train", "p", 1, wait_seconds=_ENOUGH_SECONDS) for _ in range(NUM_WAITERS)]
        waiting = asyncio.gather(*waits)
        await passed()
        async with asyncio.timeout(_ENOUGH_SECONDS / 2):  # behind the others its own wait would end first
            again = await buffer.lease_groups("train", "p", 1, wait_seconds=_ENOUGH_SECONDS, request_id="r")
        assert [lease.lease_id for lease in again.leases] == [lease.lease_id for lease in granted.leases]
        waiting.cancel()


async def test_who_knows_an_old_version_does_not_stand_behind_those_who_do_not_care() -> None:
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as buffer:
        config = pb.StreamConfig(name="train", n_samples_per_prompt=1, groups_per_step=1, max_staleness=0)
        await buffer.create_stream(config)
        await buffer.submit_prompts("train", text_prompts("q"))
        lease = (await buffer.lease_groups("train", "p", 1)).leases[0]
        waits = [buffer.lease_groups("train", "p", 1, wait_seconds=_ENOUGH_SECONDS) for _ in range(NUM_WAITERS)]
        waiting = asyncio.gather(*waits)
        await passed()
        told = asyncio.create_task(buffer.lease_groups("train", "p", 1, wait_seconds=_ENOUGH_SECONDS, oldest_version=0))
        await passed()
        await buffer.put_groups([complete_put(lease)])
        epoch = (await buffer.rewind("train", 0)).epoch
        batch = await buffer.lease_batch("train", epoch, 0)
        await buffer.consume("train", epoch, 0, batch.digest)
        answer = await told
        assert (list(answer.leases), answer.oldest_version) == ([], 1)
        assert not waiting.done()
        waiting.cancel()
