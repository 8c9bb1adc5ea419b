"""Checkpoints on disk, written by one rank whose state is a line of text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headrace.config.job import Job
from headrace.errors import ConfigError, DataLoss
from services.trainer.checkpoint import Checkpoints, newest, step_name
from services.trainer.checkpoint_reader import CheckpointReader, opened
from services.trainer.context import Context
from services.trainer.parallel import Layout
from services.trainer.piece import Piece
from services.trainer.state import TrainState


class Note:
    """A rank's state: one line."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def pieces(self) -> Iterator[Piece]:
        yield Piece.whole("note/text", torch.tensor(list(self.text.encode()), dtype=torch.uint8))

    def scalars(self) -> dict[str, int]:
        return {"length": len(self.text)}

    def restore(self, reader: CheckpointReader) -> None:
        self.text = bytes(reader.whole("note/text").tolist()).decode()
        assert len(self.text) == reader.scalars["length"]


class PowerCut(Exception):
    """Raised in the middle of a save."""


class HalfWritten(Note):
    """Gives a part of its state, and the power goes."""

    def pieces(self) -> Iterator[Piece]:
        yield from super().pieces()
        raise PowerCut


class Hoarder(Note):
    """Has more state than a note."""

    def pieces(self) -> Iterator[Piece]:
        yield from super().pieces()
        yield Piece.whole("note/secret", torch.zeros(3))


@pytest.fixture
def layout() -> Iterator[Layout]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    fields = {field.name for field in dataclasses.fields(Layout)}
    alone = {
        name: group if name.endswith("_group") else int(name.endswith("_size"))
        for name in fields - {"device", "context"}
    }
    yield Layout(device=torch.device("cpu"), context=Context(0, 1, group), **alone)  # type: ignore[arg-type]  # by kind of field
    dist.destroy_process_group()


@pytest.fixture
def checkpoints(tmp_path: Path, layout: Layout) -> Checkpoints:
    return Checkpoints(_job(tmp_path), tmp_path, layout)


def test_without_a_checkpoint_training_begins_at_step_zero(checkpoints: Checkpoints) -> None:
    policy = Note("fresh")
    assert checkpoints.restore_latest(policy) == 0
    assert policy.text == "fresh"


def test_the_newest_checkpoint_is_restored(checkpoints: Checkpoints) -> None:
    for step in (9, 10):
        _save(checkpoints, step)
    policy = Note()
    assert checkpoints.restore_latest(policy) == 10
    assert policy.text == "step 10"


def test_the_manifest_says_what_the_checkpoint_is(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.save(Note("12345"), step=7, policy_version=6, epoch=3)
    manifest = json.loads((tmp_path / "checkpoints" / step_name(7) / "manifest.json").read_text())["manifest"]
    assert manifest.pop("versions")["megatron-core"]
    assert manifest.pop("files")["rank-00000.safetensors"]["num_bytes"] > 5
    assert manifest == {
        "step": 7,
        "policy_version": 6,
        "ledger_epoch": 3,
        "layout": "tp1-pp1-dp1",
        "scalars": {"length": 5},
        "places": [
            {
                "tensor": "note/text", "file": "rank-00000.safetensors", "key": "note/text@0.0", "dtype": "uint8",
                "shape": [5], "shard": 0, "num_shards": 1, "start": 0, "end": 5,
            }
        ],
    }  # fmt: skip


def test_the_newest_two_are_kept(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step in range(1, 5):
        _save(checkpoints, step)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [step_name(3), step_name(4)]


def test_a_power_cut_while_saving_leaves_the_checkpoint_before(checkpoints: Checkpoints) -> None:
    _save(checkpoints, 1)
    with pytest.raises(PowerCut):
        checkpoints.save(HalfWritten("step 2"), step=2, policy_version=2, epoch=1)
    policy = Note()
    assert checkpoints.restore_latest(policy) == 1
    _save(checkpoints, 2)
    assert checkpoints.restore_latest(policy) == 2


DAMAGES = ["no manifest", "half a manifest", "a changed manifest", "no file", "a short file", "a flipped bit"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(checkpoints: Checkpoints, tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        _save(checkpoints, step)
    _damage(tmp_path / "checkpoints" / step_name(2), damage)
    policy = Note()
    assert checkpoints.restore_latest(policy) == 1
    assert policy.text == "step 1"


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_an_undamaged_checkpoint_nothing_starts(checkpoints: Checkpoints, tmp_path: Path, damage: str) -> None:
    _save(checkpoints, 1)
    _damage(tmp_path / "checkpoints" / step_name(1), damage)
    with pytest.raises(DataLoss, match=r"no undamaged checkpoint left \(step-00000001 are damaged\)"):
        checkpoints.restore_latest(Note())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_of_another_run_is_refused(
    checkpoints: Checkpoints, tmp_path: Path, layout: Layout, damage: str
) -> None:
    _save(checkpoints, 1)
    folder = tmp_path / "checkpoints" / step_name(1)
    assert opened(folder, layout).names == ["note/text"]
    _damage(folder, damage)
    with pytest.raises(DataLoss):
        opened(folder, layout)


def test_missing_tensors_are_named(checkpoints: Checkpoints) -> None:
    class Reader(Note):
        def restore(self, reader: CheckpointReader) -> None:
            reader.require(["note/text", "note/author"])

    _save(checkpoints, 1)
    with pytest.raises(DataLoss, match="lacks 1 tensors that this job has: note/author: resume with the settings"):
        checkpoints.restore_latest(Reader())


def test_extra_tensors_are_named(checkpoints: Checkpoints) -> None:
    checkpoints.save(Hoarder("text"), step=1, policy_version=1, epoch=1)
    with pytest.raises(DataLoss, match="holds 1 tensors that this job has no place for: note/secret"):
        checkpoints.restore_latest(Note())


def test_a_step_may_be_saved_again(checkpoints: Checkpoints, tmp_path: Path) -> None:
    _save(checkpoints, 1)
    checkpoints.save(Note("step 1 of a later epoch"), step=1, policy_version=1, epoch=2)
    policy = Note()
    assert checkpoints.restore_latest(policy) == 1
    assert policy.text == "step 1 of a later epoch"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [step_name(1)]


def test_a_power_cut_while_a_step_is_replaced_keeps_the_older_one(checkpoints: Checkpoints, tmp_path: Path) -> None:
    _save(checkpoints, 1)
    folder = tmp_path / "checkpoints"
    (folder / step_name(1)).rename(folder / (step_name(1) + ".replaced"))
    policy = Note()
    assert checkpoints.restore_latest(policy) == 1
    assert policy.text == "step 1"


def test_the_best_are_kept_by_their_steps_metric(tmp_path: Path, layout: Layout) -> None:
    rewards = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.8, 5: 0.2}
    checkpoints = Checkpoints(_job(tmp_path, keep_last=1, keep_best=2), tmp_path, layout)
    for step, reward in rewards.items():
        _save(checkpoints, step)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "reward/mean": reward}) + "\n")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [step_name(n) for n in (2, 4, 5)]


def test_a_state_is_safe_once_it_is_written_and_told_once(checkpoints: Checkpoints) -> None:
    assert checkpoints.take_safe() is None
    checkpoints.save(Note("text"), step=3, policy_version=2, epoch=1)
    assert checkpoints.take_safe() == TrainState(3, 2, 1)
    assert checkpoints.take_safe() is None


def test_in_the_background_the_copy_of_the_moment_is_written(tmp_path: Path, layout: Layout) -> None:
    class Weights(Note):
        values = torch.ones(100_000)

        def pieces(self) -> Iterator[Piece]:
            yield Piece.whole("weights", self.values)

        def restore(self, reader: CheckpointReader) -> None:
            self.values = reader.whole("weights")

    checkpoints = Checkpoints(_job(tmp_path, async_save=True), tmp_path, layout)
    weights = Weights()
    checkpoints.save(weights, step=1, policy_version=1, epoch=1)
    weights.values.zero_()
    checkpoints.flush()
    assert checkpoints.take_safe() == TrainState(1, 1, 1)
    assert checkpoints.restore_latest(weights) == 1
    assert weights.values.min() == 1


def test_a_failure_in_the_background_is_raised_when_it_is_asked_for(tmp_path: Path, layout: Layout) -> None:
    class Unwritable(Note):
        def pieces(self) -> Iterator[Piece]:
            yield Piece.whole("twice", torch.zeros(1))
            (tmp_path / "checkpoints" / ".draft").rename(tmp_path / "elsewhere")

    checkpoints = Checkpoints(_job(tmp_path, async_save=True), tmp_path, layout)
    checkpoints.save(Unwritable(), step=1, policy_version=1, epoch=1)
    with pytest.raises(Exception, match="No such file"):
        checkpoints.flush()
    assert checkpoints.take_safe() is None


def test_load_is_where_a_run_begins_and_its_own_checkpoints_come_first(tmp_path: Path, layout: Layout) -> None:
    other = tmp_path / "other"
    Checkpoints(_job(tmp_path, save=other), tmp_path, layout).save(Note("other"), step=5, policy_version=5, epoch=1)
    run = Checkpoints(_job(tmp_path, load=other), tmp_path, layout)
    policy = Note()
    assert run.restore_latest(policy) == 5
    assert policy.text == "other"
    run.save(Note("own"), step=6, policy_version=6, epoch=2)
    assert run.restore_latest(policy) == 6
    assert policy.text == "own"


def test_a_load_folder_without_a_checkpoint_is_refused(tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(ConfigError, match=r"--load .*nothing holds no whole checkpoint"):
        Checkpoints(_job(tmp_path, load=tmp_path / "nothing"), tmp_path, layout).restore_latest(Note())


def test_nothing_is_newest_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None


def _save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(Note(f"step {step}"), step=step, policy_version=step, epoch=1)


def _damage(folder: Path, damage: str) -> None:
    manifest, file = folder / "manifest.json", folder / "rank-00000.safetensors"
    content = file.read_bytes()
    match damage:
        case "no manifest":
            manifest.unlink()
        case "half a manifest":
            manifest.write_text('{"step": 2,')
        case "a changed manifest":
            manifest.write_text(manifest.read_text().replace('"policy_version": ', '"policy_version": 1'))
        case "no file":
            file.unlink()
        case "a short file":
            file.write_bytes(content[:-1])
        case "a flipped bit":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _job(tmp_path: Path, **checkpoint: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": tmp_path}, "checkpoint": checkpoint})
