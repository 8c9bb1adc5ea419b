"""Requests that wait for the engines: in turn, within bounds, and out of the way once they leave."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import DeadlineExceeded, ResourceExhausted
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.build import engine_slots, evaluated_beside_training


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


async def test_a_client_that_leaves_frees_its_slot_and_its_place_in_the_queue() -> None:
    slots = slots_of(clients=1)
    first, second, third = (Asker(slots) for _ in range(3))
    await settled()
    await second.leave()
    assert slots.shares.waiting(Kind.CLIENTS) == 1
    await first.leave()
    async with asyncio.timeout(60):
        await third.has_it.wait()
    await third.leave()
    assert (slots.shares.in_use(Kind.CLIENTS), slots.shares.waiting(Kind.CLIENTS)) == (0, 0)


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


async def test_clients_that_all_leave_at_once_do_not_hold_back_evaluations() -> None:
    slots = slots_of(clients=1, evaluation=1)
    clients = [Asker(slots) for _ in range(4)]
    await settled()
    for asker in clients:
        asker.task.cancel()
    evaluation = Asker(slots, Kind.EVALUATION)
    async with asyncio.timeout(60):
        await evaluation.has_it.wait()
    await evaluation.leave()
    await asyncio.gather(*(asker.task for asker in clients), return_exceptions=True)
    assert {slots.shares.in_use(kind) + slots.shares.waiting(kind) for kind in Kind} == {0}


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


async def test_a_turn_that_does_not_come_in_time_is_an_error_and_leaves_the_queue() -> None:
    slots = slots_of(clients=1)
    held = Asker(slots)
    await settled()
    with pytest.raises(DeadlineExceeded, match=r"no engine was free within 0\.01 s"):
        async with slots.slot(Kind.CLIENTS, seconds=0.01):
            pass
    assert slots.shares.waiting(Kind.CLIENTS) == 0
    await held.leave()


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


async def test_clients_have_an_eighth_of_trainings_slots_and_256_may_wait(load_with) -> None:
    batch = ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4"]
    job = load_with(*batch)
    slots = engine_slots(job.rollout, job.eval)
    assert slots.shares.slots(Kind.CLIENTS) == 8
    with slots.training(200):
        slots.require_room(8 + 256)
        with pytest.raises(ResourceExhausted, match="256"):
            slots.require_room(8 + 256 + 1)
