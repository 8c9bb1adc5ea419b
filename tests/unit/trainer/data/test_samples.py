"""A rank's samples: when they are fetched, which are set aside, and what is written of those that were trained."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import DataLoss, NotFound
from headrace.sample_log import SampleLog
from headrace.trajectory import Sample
from services.trainer.data.samples import Fetch, SamplesRead, SkippedSamples, TrainedSamples, UnusableSample
from services.trainer.plan.batch import Batch, SampleFacts, statistics
from services.trainer.rl.seen_tokens import SeenTokens
from tests.support.ledgers.answers import answered
from tests.support.ledgers.facts import facts
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
    ) -> list[pb.Sample]:
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
    others = ["g3-1", "g0-2"]  # than those begun, in the order asked
    assert [sample.sample_id for sample in await asyncio.to_thread(fetch, others)] == others


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


def envelope(**changes: object) -> pb.SampleEnvelope:
    fields: dict[str, object] = {
        "sample_id": "s",
        "group_id": "g",
        "status": pb.SAMPLE_STATUS_COMPLETED,
        "reward": 1.0,
        "prompt_tokens": 3,
        "response_tokens": 4,
        "trained_tokens": 4,
        "policy_ranges": [pb.PolicyRange(policy_version=2, start=0, end=4)],
    }
    return pb.SampleEnvelope(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": math.nan},
        {"reward": -1e308},
        {"status": 99},
        {"trained_tokens": 5},
        {"prompt_tokens": 0, "response_tokens": 0, "trained_tokens": 0, "policy_ranges": []},
        {"policy_ranges": [pb.PolicyRange(policy_version=0, start=0, end=9)]},
        {"policy_ranges": [pb.PolicyRange(policy_version=-1, start=0, end=4)]},
    ],
)
def test_a_bad_envelope_is_set_aside_and_its_numbers_are_used_nowhere(changes: dict[str, object]) -> None:
    good, bad = SampleFacts.of(envelope()), SampleFacts.of(envelope(**changes))
    assert good.set_aside is None
    assert bad.set_aside
    assert (bad.status, bad.reward, bad.response_length) == ("failed", None, 0)
    found = statistics(Batch((good, bad), b""), 3)
    assert found["samples/set_aside"] == found["samples/failed"] == 1.0
    assert all(math.isfinite(value) for value in found.values())


def test_a_trainer_that_starts_again_sets_the_same_samples_aside(tmp_path: Path) -> None:
    path, batch = tmp_path / "set_aside.jsonl", Batch((facts("a"), facts("b"), facts("c")), b"digest")
    known = SkippedSamples(path)
    assert known.applied(batch) == batch
    known.append(
        3, [UnusableSample("b", "DATA_LOSS", "it came damaged"), UnusableSample("c", "NOT_FOUND", "it is gone")]
    )
    again = SkippedSamples(path)
    for record in (known, again):
        samples = record.applied(batch).samples
        assert [s.set_aside for s in samples] == [None, "it came damaged", None]
        assert samples[1] == replace(batch.samples[1], status="failed", reward=None, set_aside="it came damaged")


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "set_aside.jsonl"
    SkippedSamples(path).append(0, [UnusableSample("a", "X", "x")])
    path.write_bytes(path.read_bytes() + b'{"step": 1, "sample')
    SkippedSamples(path).append(1, [UnusableSample("b", "X", "x")])
    samples = SkippedSamples(path).applied(Batch((facts("a"), facts("b"), facts("c")), b"")).samples
    assert [s.sample_id for s in samples if s.set_aside] == ["a", "b"]


def test_what_a_step_read_and_trained_is_written(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples")
    gone = UnusableSample("c", "NOT_FOUND", "gone")
    read = SamplesRead(lambda ids: [gone if name == "c" else answered(name) for name in ids], step=4)
    assert [one.sample_id for one in read(["a", "b"])] == ["a", "b"]
    assert read(["b", "c"])[1] is gone
    writer = TrainedSamples(log, 0, 1 << 20)
    writer.write(4, read.of(["a"]), seen={}, shown=())
    writer.wait()
    assert [(one.sample_id, one.step, one.advantage) for one in log.of_step(4)] == [("a", 4, None)]
    assert list(log.tokens_of(4)) == []


def test_a_trained_sample_has_its_advantage_and_a_shown_one_its_tokens(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples")
    read = SamplesRead(lambda ids: [answered(name) for name in ids], step=4)
    seen = {one.sample_id: seen_tokens(one) for one in read(["a", "b"]) if isinstance(one, Sample)}
    writer = TrainedSamples(log, 0, 1 << 20)
    writer.write(4, read.of(["a", "b"]), seen, shown=["b"])
    writer.wait()
    assert [(one.advantage, one.log_prob_gap) for one in log.of_step(4)] == [(0.5, 0.25)] * 2
    (columns,) = log.tokens_of(4)
    assert (columns.sample_id, columns.tokens, columns.loss_mask) == ("b", [0, 1, 2, 3, 4], [1, 0])
    assert (columns.engine_log_probs, columns.trainer_log_probs) == ([0.0, 0.0], [-0.25, None])
    assert columns.advantages == [0.5, 7.0]


def seen_tokens(sample: Sample) -> SeenTokens:
    """Its second token is not trained, and has a log-prob that is no number."""
    mask, trainer, advantages = (np.array(each, np.float32) for each in ([1, 0], [-0.25, np.nan], [0.5, 7.0]))
    return SeenTokens(sample, mask, trainer, advantages, is_policy_loss=True)
