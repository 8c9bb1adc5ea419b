"""Evaluation's samples beside training's: few while there are some, more while there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headrace.trajectory import Sample
from services.rollout.evaluation.evaluation_slots import EvaluationSlots
from services.rollout.in_flight import evaluated_beside_training
from services.rollout.production.sampling import SampleRequest


class Busy:
    """A sampler with so many of training's samples in flight, beside those of evaluations."""

    def __init__(self, training: int) -> None:
        self._training = training
        self.evaluated = 0
        self.in_flight = training
        self.most = 0
        self.finish = asyncio.Event()

    def training_pauses(self) -> None:
        self.in_flight -= self._training

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        self.evaluated += 1
        self.in_flight += 1
        self.most = max(self.most, self.evaluated)
        await self.finish.wait()
        self.evaluated -= 1
        self.in_flight -= 1
        return []


async def evaluate(slots: EvaluationSlots, sampler: Busy) -> None:
    async with slots.slot(sampler):
        await sampler.sample_all([], evaluation=True)


async def until_in_flight(sampler: Busy, count: int) -> None:
    async with asyncio.timeout(60):
        while sampler.evaluated < count:
            await asyncio.sleep(0.001)
    for _ in range(100):
        await asyncio.sleep(0)
    assert sampler.evaluated == count


async def test_few_samples_are_evaluated_while_training_generates_and_more_once_it_does_not() -> None:
    sampler = Busy(training=5)
    slots = EvaluationSlots(sampler, beside=2, alone=8)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(evaluate(slots, sampler))
        await until_in_flight(sampler, 2)
        sampler.training_pauses()
        await until_in_flight(sampler, 8)
        sampler.finish.set()
    assert sampler.most == 8


async def test_samples_of_a_data_sets_own_function_are_not_taken_for_trainings() -> None:
    training, other = Busy(training=0), Busy(training=0)
    slots = EvaluationSlots(training, beside=1, alone=8)
    async with asyncio.TaskGroup() as tasks:
        for sampler in (training, other, other):
            tasks.create_task(evaluate(slots, sampler))
        await until_in_flight(other, 2)
        await until_in_flight(training, 1)
        training.finish.set()
        other.finish.set()


async def test_a_slot_that_a_failing_or_cancelled_sample_had_is_free_again() -> None:
    sampler = Busy(training=1)
    slots = EvaluationSlots(sampler, beside=1, alone=1)
    with pytest.raises(ZeroDivisionError):
        async with slots.slot(sampler):
            raise ZeroDivisionError
    hanging = asyncio.create_task(evaluate(slots, sampler))
    await until_in_flight(sampler, 1)
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    sampler.finish.set()
    async with asyncio.timeout(60):
        await evaluate(slots, sampler)


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
    batch = [
        "--rollout-batch-size",
        "8",
        *([] if "--n-samples-per-prompt" in flags else ["--n-samples-per-prompt", "4"]),
    ]
    job = load_with("--eval-prompt-data", "sums", str(tmp_path / "eval.jsonl"), *batch, *flags)
    assert evaluated_beside_training(job) == expected
