"""Checkpoints on disk, written by one rank whose state is a line of text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headrace.config.job import Job
from headrace.errors import ConfigError, FailedPrecondition
from services.trainer.checkpoint import Checkpoints, newest, step_name
from services.trainer.parallel import Layout


class Note:
    """A rank's state: one line."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def save(self, folder: Path) -> None:
        (folder / "rank-00000.txt").write_text(self.text)

    def restore(self, folder: Path) -> None:
        self.text = (folder / "rank-00000.txt").read_text()


class PowerCut(Exception):
    """Raised in the middle of a save."""


class HalfWritten(Note):
    """Writes a part of its state, and the power goes."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        raise PowerCut


@pytest.fixture
def layout() -> Iterator[Layout]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield Layout(0, 1, torch.device("cpu"), 0, 1, 0, 1, 0, 1, group, group, group)
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
    manifest = json.loads((tmp_path / "checkpoints" / step_name(7) / "manifest.json").read_text())
    assert manifest.pop("versions")["megatron-core"]
    assert manifest == {
        "step": 7,
        "policy_version": 6,
        "ledger_epoch": 3,
        "layout": "tp1-pp1-dp1",
        "files": {"rank-00000.txt": 5},
    }


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


@pytest.mark.parametrize("damage", ["no manifest", "half a manifest", "a file is missing", "a file is short"])
def test_a_damaged_checkpoint_is_passed_over(checkpoints: Checkpoints, tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        _save(checkpoints, step)
    folder = tmp_path / "checkpoints" / step_name(2)
    match damage:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "half a manifest":
            (folder / "manifest.json").write_text('{"step": 2,')
        case "a file is missing":
            (folder / "rank-00000.txt").unlink()
        case "a file is short":
            (folder / "rank-00000.txt").write_text("st")
    policy = Note()
    assert checkpoints.restore_latest(policy) == 1
    assert policy.text == "step 1"


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


def test_another_layout_is_refused_with_both_named(checkpoints: Checkpoints, tmp_path: Path, layout: Layout) -> None:
    _save(checkpoints, 1)
    wider = Checkpoints(_job(tmp_path), tmp_path, replace(layout, tp_size=2))
    with pytest.raises(FailedPrecondition, match=r"tp1-pp1-dp1, this one is tp2-pp1-dp1: start with the same"):
        wider.restore_latest(Note())


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


def _job(tmp_path: Path, **checkpoint: Path) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": tmp_path}, "checkpoint": checkpoint})
