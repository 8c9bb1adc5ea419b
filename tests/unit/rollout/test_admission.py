"""Who may ask the engines: turns within bounds, shares of each kind of work, a limit that follows the load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ResourceExhausted
from services.rollout.admission import EngineSlots, GroupsLimit, Kind, LoadWatch, Shares
from services.rollout.build import evaluated_beside_training
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.replies import EngineLoad
from tests.support.fakes.fake_fleet import FakeFleet


def slots_of(*, training: int = 0, evaluation: int = 0, clients: int = 1, max_waiting: int = 10) -> EngineSlots:
    shares = Shares({Kind.TRAINING: training, Kind.EVALUATION: evaluation, Kind.CLIENTS: clients})
    return EngineSlots(shares, max_waiting=max_waiting)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Asker:
    """Holds a slot until it is told to end."""

    def __init__(self, slots: EngineSlots, kind: Kind = Kind.CLIENTS) -> None:
        self.has_it, self.end = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._ask(slots, kind))

    async def _ask(self, slots: EngineSlots, kind: Kind) -> None:
        async with slots.slot(kind):
            self.has_it.set()
            await self.end.wait()

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_requests_have_their_turn_in_the_order_in_which_they_came() -> None:
    slots = slots_of(clients=1)
    askers = [Asker(slots) for _ in range(3)]
    for asker, later in zip(askers, [*askers[1:], None], strict=True):
        async with asyncio.timeout(60):
            await asker.has_it.wait()
        assert later is None or not later.has_it.is_set()
        asker.end.set()
    await asyncio.gather(*(asker.task for asker in askers))
    assert slots.shares.in_use(Kind.CLIENTS) == 0


async def test_one_that_leaves_in_the_moment_of_its_turn_hands_it_on() -> None:
    slots = slots_of(clients=1)
    first, second, third = (Asker(slots) for _ in range(3))
    await settled()
    first.end.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await second.leave()
    async with asyncio.timeout(60):
        await third.has_it.wait()
    await third.leave()
    assert (slots.shares.in_use(Kind.CLIENTS), slots.shares.waiting(Kind.CLIENTS)) == (0, 0)


async def test_more_clients_than_may_wait_are_told_to_come_again() -> None:
    slots = slots_of(clients=1, max_waiting=1)
    held, waits = Asker(slots), Asker(slots)
    await settled()
    with pytest.raises(ResourceExhausted, match="would exceed the 1 that may") as refused:
        async with slots.slot(Kind.CLIENTS):
            pass
    assert refused.value.retry_after_seconds > 0
    await held.leave()
    await waits.leave()
    slots.require_room(2)
    with pytest.raises(ResourceExhausted):
        slots.require_room(3)


async def test_training_never_waits_and_a_person_who_asks_beside_it_has_a_slot() -> None:
    slots = slots_of(training=8, clients=1)
    with slots.training(8):
        person = Asker(slots)
        async with asyncio.timeout(60):
            await person.has_it.wait()
        other = Asker(slots)
        await settled()
        assert not other.has_it.is_set()
    async with asyncio.timeout(60):
        await other.has_it.wait()
    await person.leave()
    await other.leave()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 8),
        (["--eval-samples-in-flight", "3"], 3),
        (["--eval-exact-version"], 64),
        (["--eval-exact-version", "--eval-samples-in-flight", "3"], 3),
        (["--max-groups-in-flight", "1", "--n-samples-per-prompt", "4"], 1),
    ],
)
def test_eval_samples_in_flight_says_how_many_are_evaluated_beside_training(
    tmp_path, load_with, flags: list[str], expected: int
) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "a"}\n')
    samples = [] if "--n-samples-per-prompt" in flags else ["--n-samples-per-prompt", "4"]
    job = load_with(
        "--eval-prompt-data", "sums", str(tmp_path / "eval.jsonl"), "--rollout-batch-size", "8", *samples, *flags
    )
    assert evaluated_beside_training(job.rollout, job.eval) == expected


WAITING = (Kind.EVALUATION, Kind.CLIENTS)
SLOTS = st.fixed_dictionaries({kind: st.integers(1, 6) for kind in Kind})
EVENTS = st.lists(
    st.tuples(st.sampled_from(["come", "come", "end", "leave", "train", "trained"]), st.sampled_from(WAITING)),
    max_size=120,
)


def drained(shares: Shares) -> list[Kind]:
    begun = []
    while (kind := shares.next()) is not None:
        begun.append(kind)
    return begun


def happened(shares: Shares, event: str, kind: Kind) -> None:
    """What is not possible now does not happen."""
    if event == "come":
        shares.wait(kind)
    elif event == "end" and shares.in_use(kind):
        shares.free(kind)
    elif event == "leave" and shares.waiting(kind):
        shares.give_up(kind)
    elif event == "train" and shares.in_use(Kind.TRAINING) < shares.slots(Kind.TRAINING):
        shares.take(Kind.TRAINING)
    elif event == "trained" and shares.in_use(Kind.TRAINING):
        shares.free(Kind.TRAINING)


@settings(deadline=None)
@given(slots=SLOTS, events=EVENTS)
def test_nobody_waits_while_a_slot_is_free_and_whoever_waits_has_its_own_in_use(
    slots: Mapping[Kind, int], events: list[tuple[str, Kind]]
) -> None:
    shares, total = Shares(slots), sum(slots.values())
    for event, kind in events:
        happened(shares, event, kind)
        drained(shares)
        in_use = {each: shares.in_use(each) for each in Kind}
        for waiting in (each for each in WAITING if shares.waiting(each)):
            assert sum(in_use.values()) >= total
            assert in_use[waiting] >= slots[waiting]
        assert sum(in_use.values()) < 2 * total
        assert in_use[Kind.TRAINING] <= slots[Kind.TRAINING], "and training never waited"


@settings(deadline=None)
@given(slots=SLOTS, flood=st.sampled_from(WAITING), count=st.integers(1, 30))
def test_a_flood_of_one_kind_starves_no_other(slots: Mapping[Kind, int], flood: Kind, count: int) -> None:
    other = Kind.CLIENTS if flood is Kind.EVALUATION else Kind.EVALUATION
    shares = Shares(slots)
    for _ in range(count):
        shares.wait(flood)
    drained(shares)
    for _ in range(slots[other]):
        shares.wait(other)
    assert drained(shares).count(other) == slots[other]


LOADS = st.lists(
    st.builds(EngineLoad, st.integers(0, 500), st.integers(0, 500), st.floats(0, 1), st.integers(0, 3)), max_size=3
)


@settings(deadline=None)
@given(most=st.integers(1, 300), readings=st.lists(st.tuples(LOADS, st.integers(0, 400)), max_size=100))
def test_the_limit_is_never_below_one_group_nor_above_the_most(
    most: int, readings: list[tuple[list[EngineLoad], int]]
) -> None:
    limit = GroupsLimit(most)
    for loads, in_flight in readings:
        before = limit.now
        now = limit.read(loads, in_flight)
        assert 1 <= now <= most
        assert now <= before or in_flight >= before, "it rises only where it holds production back"
        assert loads or now == before, "without an answer nothing changes"


async def test_the_limit_falls_while_requests_queue_at_the_engines_and_rises_again(fakes: FakeFleet) -> None:
    told: list[int] = []
    limit = GroupsLimit(8)
    watch = LoadWatch(
        lambda: fakes.fleet.engines, limit, lambda: limit.now, told.append, lambda _: None, look_seconds=0.01
    )
    engine = fakes.fake(0)
    engine.max_running = 2
    engine.token_seconds = 0.02
    asking = [
        asyncio.create_task(
            fakes.fleet.engines[0].client.generate(
                (1, 2), SamplingParams(max_new_tokens=5000), request_id=f"r{number}", cache_key="c", seconds=60
            )
        )
        for number in range(8)
    ]
    watch.start()
    await fakes.until(lambda: limit.now == 1)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await fakes.until(lambda: limit.now == 8)
    await watch.stop()
    assert told[-1] == 8
    assert min(told) == 1
