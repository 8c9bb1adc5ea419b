"""Rollout steps as files: what comes back is what was kept, and what is not a step is refused with the way out."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import DataLoss, DiskFull, NotFound
from headrace.recorded_steps import RecordedStep, RecordedSteps
from headrace.trajectory import Sample
from services.trainer.data.buffer import RecordedBuffer, StepRecorder
from tests.support.ledgers.answers import answered
from tests.support.refusals import refused


def step_of(*names: str, group: str = "g") -> RecordedStep:
    samples = [answered(name, group_id=group).pack() for name in names]
    batch = buffer_pb2.LeaseBatchResponse(ready=True, digest=b"d" * 32)
    batch.groups.add(group_id=group, samples=[sample.envelope for sample in samples])
    return RecordedStep(batch, samples)


@given(names=st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=5, unique=True))
def test_what_is_read_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    steps = RecordedSteps(str(tmp_path_factory.mktemp("steps") / "new" / "step-{rollout_id}.samples"))
    steps.write(7, step_of(*names))
    found = steps.read(7)
    assert found.batch == step_of(*names).batch
    assert list(found.samples) == list(step_of(*names).samples)
    assert [Sample.unpack(sample).sample_id for sample in found.samples] == names == steps.read_ids(7)
    assert steps.steps() == [7]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda whole: whole[:-3], "damaged"),
        (lambda whole: whole + b"\x05ab", "damaged"),
        (lambda whole: b"", "it has 0 of the 0 samples"),
        (lambda whole: whole[: 57 + step_of("a", "b").batch.ByteSize()], "it has 0 of the 2 samples that it names"),
        (lambda whole: b"\xff" * 400, "damaged"),
        (lambda whole: b"PK\x03\x04 torch", "is a file of PyTorch, which is not opened"),
        (lambda whole: pickle.dumps({"samples": []}), "is a file of PyTorch, which is not opened"),
    ],
)
def test_what_is_no_step_is_refused(tmp_path: Path, harm: Callable[[bytes], bytes], said: str) -> None:
    steps = RecordedSteps(str(tmp_path / "{rollout_id}"))
    steps.write(0, step_of("a", "b"))
    steps.path_of(0).write_bytes(harm(steps.path_of(0).read_bytes()))
    with pytest.raises(DataLoss, match=said):
        steps.read(0)


def kept_or_refused(steps: RecordedSteps, whole: bytes, flipped: Sequence[int], expected: RecordedStep) -> bool:
    """True when a step is refused whose bits are flipped; what is read all the same must be what was written."""
    data = bytearray(whole)
    for bit in flipped:
        data[bit // 8] ^= 1 << bit % 8
    steps.path_of(0).write_bytes(data)
    ids = [sample.envelope.sample_id for sample in expected.samples]
    with suppress(DataLoss):
        assert steps.read_ids(0) == ids, flipped
    try:
        found = steps.read(0)
    except DataLoss:
        return True
    assert (found.batch, list(found.samples)) == (expected.batch, list(expected.samples)), flipped
    return False


@pytest.mark.parametrize("num_flips", [1, 17])
def test_a_step_with_flipped_bits_is_refused_wherever_they_are(tmp_path: Path, num_flips: int) -> None:
    """The first bits one by one, where the format is named; others at random, single ones and several at once."""
    steps, expected = RecordedSteps(str(tmp_path / "{rollout_id}")), step_of("first", "b", "third")
    steps.write(0, expected)
    whole, chance = steps.path_of(0).read_bytes(), random.Random(num_flips)
    turns = [chance.sample(range(len(whole) * 8), num_flips) for _ in range(500)]
    if num_flips == 1:
        turns = [*([bit] for bit in range(min(len(whole) * 8, 8 * 256))), *turns]
    num_refused = sum([kept_or_refused(steps, whole, flipped, expected) for flipped in turns])
    assert num_refused == len(turns)


async def test_a_rank_finds_the_step_of_its_samples(tmp_path: Path) -> None:
    steps = RecordedSteps(str(tmp_path / "{rollout_id}"))
    for step in range(4):
        steps.write(step, step_of(f"{step}a", f"{step}b"))
    buffer = RecordedBuffer(steps)
    for step in (2, 3, 0, 1):
        found = await buffer.fetch_samples("train", [f"{step}b", f"{step}a"])
        assert [sample.envelope.sample_id for sample in found] == [f"{step}b", f"{step}a"]
    assert await buffer.fetch_samples("train", []) == []
    assert (await buffer.try_lease_batch("train", 1, 2)).digest == b"d" * 32
    for missing in (["x"], ["0a", "1a"]):
        with pytest.raises(NotFound, match="no sample"):
            await buffer.fetch_samples("train", missing)


async def test_a_step_is_kept_once_whole_and_a_disk_that_is_full_says_so(tmp_path: Path) -> None:
    source, kept = RecordedSteps(str(tmp_path / "{rollout_id}")), RecordedSteps(str(tmp_path / "kept-{rollout_id}"))
    source.write(0, step_of("a", "b"))
    buffer = RecordedBuffer(source)
    recorder = StepRecorder(kept, buffer, "train")
    await recorder.keep(0, (await buffer.try_lease_batch("train", 1, 0)))
    assert kept.path_of(0).read_bytes() == source.path_of(0).read_bytes()
    kept.path_of(0).unlink()
    await recorder.keep(0, (await buffer.try_lease_batch("train", 1, 0)))
    assert not kept.path_of(0).exists(), "a batch that is leased again is kept already"
    full = StepRecorder(RecordedSteps("/dev/full/{rollout_id}"), buffer, "train")
    with refused(DiskFull, "/dev/full/0"):
        await full.keep(0, (await buffer.try_lease_batch("train", 1, 0)))
