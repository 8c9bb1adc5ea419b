"""A rank's samples: asked for when they are needed, or begun before and only waited for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.errors import DataLoss, NotFound
from headrace.trajectory import Sample
from services.trainer.data.samples import Fetch, UnusableSample
from tests.support.ranks.rank_cases import samples


class Buffer(BufferClient):
    """Notes what is asked, and answers once it may."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.may_answer = asyncio.Event()
        self.known: dict[str, Sample] = {sample.sample_id: sample for sample in samples(0)}
        self.damaged: set[str] = set()
        self.damaged_once: set[str] = set()

    async def fetch_samples(
        self, stream: str, sample_ids: Sequence[str], *, deadline_seconds: float | None = None
    ) -> list[sample_pb2.Sample]:
        self.asked.append(list(sample_ids))
        await self.may_answer.wait()
        if gone := [sample_id for sample_id in sample_ids if sample_id not in self.known]:
            raise NotFound(f"there is no payload of {gone}")
        if damaged := self.damaged.intersection(sample_ids):
            raise DataLoss(f"the records of {damaged} are damaged")
        packed = [self.known[sample_id].pack() for sample_id in sample_ids]
        for sample in packed:
            if sample.envelope.sample_id in self.damaged_once:
                self.damaged_once.discard(sample.envelope.sample_id)
                sample.payload = sample.payload[:-1]
        return packed


@pytest.fixture
async def buffer() -> Buffer:
    return Buffer()


async def test_samples_come_in_the_order_asked(buffer: Buffer) -> None:
    buffer.may_answer.set()
    fetch = Fetch(buffer, "train", asyncio.get_running_loop())
    found = await asyncio.to_thread(fetch, ["g1-0", "g0-2"])
    assert [sample.sample_id for sample in found] == ["g1-0", "g0-2"]


async def test_a_step_and_the_next_are_under_way_together(buffer: Buffer) -> None:
    """As the loop does it: each step's samples are begun before those of the step before are asked for."""
    buffer.may_answer.set()
    fetch = Fetch(buffer, "train", asyncio.get_running_loop())
    steps = [["g0-0"], ["g0-1"], ["g0-2"], ["g1-0"]]
    await asyncio.to_thread(fetch.begin, steps[0])
    for step, upcoming in itertools.pairwise(steps):
        await asyncio.to_thread(fetch.begin, upcoming)
        assert [sample.sample_id for sample in await asyncio.to_thread(fetch, step)] == step
    assert buffer.asked == steps


async def test_other_samples_than_those_begun_are_fetched_all_the_same(buffer: Buffer) -> None:
    fetch = Fetch(buffer, "train", asyncio.get_running_loop())
    await asyncio.to_thread(fetch.begin, ["g0-0"])
    buffer.may_answer.set()
    assert [sample.sample_id for sample in await asyncio.to_thread(fetch, ["g3-1"])] == ["g3-1"]


async def test_a_sample_that_the_ledger_cannot_give_does_not_keep_the_others(buffer: Buffer) -> None:
    buffer.may_answer.set()
    buffer.damaged = {"g0-1"}
    fetch = Fetch(buffer, "train", asyncio.get_running_loop())
    found = await asyncio.to_thread(fetch, ["g0-0", "g0-1", "gone", "g0-2", "g1-0"])
    assert [one.sample_id for one in found] == ["g0-0", "g0-1", "gone", "g0-2", "g1-0"]
    assert {one.sample_id: one.reason for one in found if isinstance(one, UnusableSample)} == {
        "g0-1": "DATA_LOSS",
        "gone": "NOT_FOUND",
    }


async def test_what_was_damaged_on_its_way_is_asked_for_again(buffer: Buffer) -> None:
    buffer.may_answer.set()
    buffer.damaged_once = {"g0-1"}
    fetch = Fetch(buffer, "train", asyncio.get_running_loop())
    found = await asyncio.to_thread(fetch, ["g0-0", "g0-1"])
    assert all(isinstance(one, Sample) for one in found)
    assert buffer.asked == [["g0-0", "g0-1"], ["g0-1"]]
