"""What the trainer set aside is known when it starts again, and envelopes that no sample may have are never planned."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.api.sample.v1 import sample_pb2 as pb
from services.trainer.data.samples import SkippedSamples, UnusableSample
from services.trainer.plan.batch import Batch, SampleFacts, statistics
from tests.support.ledgers.facts import facts


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
        {"reward": math.inf},
        {"reward": -1e308},
        {"status": 0},
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
