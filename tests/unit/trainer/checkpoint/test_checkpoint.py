"""Checkpoints on disk, written by one rank whose state is a line of text."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.errors import ConfigError, DataLoss, FailedPrecondition, Fenced
from headrace.job.schema.run import CheckpointSection
from headrace.launch.previous_run import scored_by
from services.trainer.checkpoint.checkpoint import Checkpoints, step_name, whole_checkpoints
from services.trainer.checkpoint.manifest import Manifest, ShardChunk, crc32
from services.trainer.checkpoint.resharding import CheckpointReader, Expected, opened
from services.trainer.control.worker import RankWorker
from services.trainer.megatron.parallel import Context, Layout
from services.trainer.plan.batch import SampleFacts
from services.trainer.state import TrainState


class Note:
    """A rank's state: one line."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def chunks(self) -> Iterator[ShardChunk]:
        yield ShardChunk.whole("note/text", torch.tensor(list(self.text.encode()), dtype=torch.uint8))

    def scalars(self) -> dict[str, int]:
        return {"length": len(self.text)}

    def restore(self, reader: CheckpointReader) -> None:
        self.text = bytes(reader.whole("note/text").tolist()).decode()
        assert len(self.text) == reader.scalars["length"]


class PowerCut(BaseException):
    """Raised in the middle of a save."""


class Hoarder(Note):
    """Has more state than a note."""

    def chunks(self) -> Iterator[ShardChunk]:
        yield from super().chunks()
        yield ShardChunk.whole("note/secret", torch.zeros(3))


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
    return Checkpoints(_section(), tmp_path, layout)


DAMAGES = ["no manifest", "half a manifest", "a changed manifest", "no file", "a short file", "a flipped bit"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_without_an_undamaged_one_nothing_starts(
    checkpoints: Checkpoints, tmp_path: Path, layout: Layout, damage: str
) -> None:
    for step in (1, 2):
        _save(checkpoints, step)
    first, second = (tmp_path / "checkpoints" / step_name(step) for step in (1, 2))
    _damage(second, damage)
    policy = Note()
    assert checkpoints.restore_latest(policy) == 1
    assert policy.text == "step 1"
    whole = [manifest.step for _, manifest in whole_checkpoints(tmp_path / "checkpoints")]
    assert whole == [1] or damage == "a flipped bit"  # which only a reading of the file finds
    assert opened(first, layout).names == ["note/text"]
    _damage(first, damage)
    with pytest.raises(DataLoss):  # as a model that another job starts from
        opened(first, layout)
    with pytest.raises(DataLoss, match=r"every checkpoint in .* is damaged .*: replace one"):
        checkpoints.restore_latest(Note())


def test_missing_and_extra_tensors_are_named(checkpoints: Checkpoints) -> None:
    class Reader(Note):
        def restore(self, reader: CheckpointReader) -> None:
            reader.require({"note/text": Expected((6,)), "note/author": Expected((4,))})

    _save(checkpoints, 1)
    with pytest.raises(DataLoss, match="lacks 1 tensors that this job has: note/author: resume with the settings"):
        checkpoints.restore_latest(Reader())
    checkpoints.save(Hoarder("text"), step=2, policy_version=2, epoch=1)
    with pytest.raises(DataLoss, match="holds 1 tensors that this job has no place for: note/secret"):
        checkpoints.restore_latest(Note())


def test_an_older_folder_whose_successor_never_came_is_pruned_as_any_checkpoint(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    _save(checkpoints, 1)
    folder = tmp_path / "checkpoints"
    alone = f"{step_name(1)}.replaced-ab"
    (folder / step_name(1)).rename(folder / alone)
    _save(checkpoints, 2)
    assert _names(tmp_path) == [alone, step_name(2)]
    _save(checkpoints, 3)
    assert _names(tmp_path) == [step_name(2), step_name(3)]


@pytest.mark.parametrize(("metric", "section"), [
    ("reward/mean", {}),
    ("eval/sums", {"keep_best_metric": "eval/sums"}),
])  # fmt: skip
def test_the_best_are_kept_by_their_steps_metric(
    tmp_path: Path, layout: Layout, metric: str, section: dict[str, str]
) -> None:
    scores = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.8, 5: 0.2}
    checkpoints = Checkpoints(_section(keep_last=1, keep_best=2, **section), tmp_path, layout)
    for step, score in scores.items():
        _save(checkpoints, step)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "reward/mean": -score, metric: score}) + "\n")
    assert _names(tmp_path) == [step_name(n) for n in (2, 4, 5)]


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_keep_last_says_how_many_of_the_newest_stay(
    tmp_path: Path, layout: Layout, keep_last: int, kept: list[int]
) -> None:
    checkpoints = Checkpoints(_section(keep_last=keep_last), tmp_path, layout)
    for step in range(1, 5):
        _save(checkpoints, step)
    assert _names(tmp_path) == [step_name(n) for n in kept]


def test_a_state_is_safe_once_it_is_written_and_told_once(checkpoints: Checkpoints) -> None:
    assert checkpoints.take_safe() is None
    checkpoints.save(Note("text"), step=3, policy_version=2, epoch=1)
    assert checkpoints.take_safe() == TrainState(3, 2, 1)
    assert checkpoints.take_safe() is None


class Trained(Note):
    """A policy that takes the samples, and saves a note."""

    set_aside: Sequence[Any] = ()
    is_logged = False

    @property
    def saved(self) -> Note:
        return self

    def train(self, *_: object) -> dict[str, float]:
        return {}


def test_a_checkpoint_names_the_scorers_that_paid_for_the_samples_since_the_one_before(
    checkpoints: Checkpoints,
) -> None:
    def sample(scorer: str, version: str) -> SampleFacts:
        return SampleFacts.of(
            pb.SampleEnvelope(
                sample_id="a", status=pb.SAMPLE_STATUS_COMPLETED, prompt_tokens=1, scorer=scorer, scorer_version=version
            )
        )

    worker: Any = RankWorker(Trained("text"), None, None, checkpoints, None)  # type: ignore[arg-type]  # a rank that only saves
    worker.train(0, [sample("math", "1 sha256:ab")] * 3)
    worker.train(1, [sample("math", "1 sha256:ab"), sample("custom", "r.py:f sha256:cd"), sample("", "")])
    worker.save(2, 2, 1)
    worker.train(2, [sample("custom", "r.py:f sha256:cd")])
    worker.save(3, 3, 1)
    assert {step: scored_by(checkpoints.path_of(step)) for step in (1, 2, 3)} == {
        1: {},  # there is none
        2: {"math 1 sha256:ab": 4, "custom r.py:f sha256:cd": 1},
        3: {"custom r.py:f sha256:cd": 1},
    }


def test_in_the_background_the_copy_of_the_moment_is_written(tmp_path: Path, layout: Layout) -> None:
    class Weights(Note):
        values = torch.ones(100_000)

        def chunks(self) -> Iterator[ShardChunk]:
            yield ShardChunk.whole("weights", self.values)

        def restore(self, reader: CheckpointReader) -> None:
            self.values = reader.whole("weights")

    checkpoints = Checkpoints(_section(async_save=True), tmp_path, layout)
    weights = Weights()
    checkpoints.save(weights, step=1, policy_version=1, epoch=1)
    weights.values.zero_()
    checkpoints.flush()
    assert checkpoints.take_safe() == TrainState(1, 1, 1)
    assert checkpoints.restore_latest(weights) == 1
    assert weights.values.min() == 1


def test_a_failure_in_the_background_is_raised_when_it_is_asked_for(tmp_path: Path, layout: Layout) -> None:
    class Unwritable(Note):
        def chunks(self) -> Iterator[ShardChunk]:
            yield ShardChunk.whole("twice", torch.zeros(1))
            (tmp_path / "checkpoints" / ".draft-1").rename(tmp_path / "elsewhere")

    checkpoints = Checkpoints(_section(async_save=True), tmp_path, layout)
    checkpoints.save(Unwritable(), step=1, policy_version=1, epoch=1)
    with pytest.raises(Exception, match="No such file"):
        checkpoints.flush()
    assert checkpoints.take_safe() is None


def test_load_is_where_a_run_begins_and_its_own_checkpoints_come_first(tmp_path: Path, layout: Layout) -> None:
    other = tmp_path / "other"
    Checkpoints(_section(save=other), tmp_path, layout).save(Note("other"), step=5, policy_version=5, epoch=1)
    run = Checkpoints(_section(load=other), tmp_path, layout)
    policy = Note()
    assert run.restore_latest(policy) == 5
    assert policy.text == "other"
    run.save(Note("own"), step=6, policy_version=6, epoch=2)
    assert run.restore_latest(policy) == 6
    assert policy.text == "own"


def test_a_load_folder_that_is_not_there_yet_begins_and_one_without_a_checkpoint_is_refused(
    tmp_path: Path, layout: Layout
) -> None:
    checkpoints = Checkpoints(_section(load=tmp_path / "nothing"), tmp_path, layout)
    assert checkpoints.restore_latest(Note()) == 0
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "notes.txt").write_text("of somebody")
    with pytest.raises(ConfigError, match=r"--load .*nothing holds no whole checkpoint"):
        checkpoints.restore_latest(Note())


def test_a_files_checksum_is_of_all_its_bytes(tmp_path: Path) -> None:
    content = b"a" * (1 << 22) + b"b"
    (tmp_path / "file").write_bytes(content)
    assert crc32(tmp_path / "file") == zlib.crc32(content)


def test_a_tensor_of_which_a_part_is_nowhere_is_not_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    _save(checkpoints, 1)
    folder = tmp_path / "checkpoints" / step_name(1)
    manifest = Manifest.read(folder)
    (place,) = manifest.places
    reader = CheckpointReader(folder, dataclasses.replace(manifest, places=[dataclasses.replace(place, end=3)]))
    with pytest.raises(DataLoss, match="note/text has no elements 3 to 6 of shard 0"):
        reader.whole("note/text")


OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


class Power:
    """Writes down what is done to the disk, and is cut before one of the operations, or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.cut_before: int | None = None
        self.cut_after: int | None = None
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._observed(name, getattr(os, name)))

    def _observed(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def operation(path: Any, *more: Any, **named: Any) -> None:
            what = os.readlink(f"/proc/self/fd/{path}") if name == "fsync" else str(path)
            if len(self.done) == self.cut_before:
                raise PowerCut
            real(path, *more, **named)
            self.done.append(
                f"{name} {Path(what).name}"
                + (f" {Path(more[0]).name}" if more and name in ("rename", "replace") else "")
            )
            if len(self.done) - 1 == self.cut_after:
                raise PowerCut

        return operation


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Power:
    return Power(monkeypatch)


def test_every_file_and_every_new_folders_name_is_on_the_disk_before_a_checkpoint_is_visible(
    tmp_path: Path, layout: Layout, power: Power
) -> None:
    Checkpoints(_section(save=tmp_path / "new" / "folder"), tmp_path, layout).save(
        Note("text"), step=1, policy_version=1, epoch=1
    )
    visible = power.done.index(f"rename .draft-1 {step_name(1)}")
    before = power.done[:visible]
    assert before.index("mkdir new") < before.index(f"fsync {tmp_path.name}") < before.index("mkdir .draft-1")
    assert before.index("mkdir folder") < before.index("fsync new") < before.index("mkdir .draft-1")
    draft = f".manifest.{os.getpid()}.json"
    named = before.index(f"replace {draft} manifest.json")
    assert before.index("fsync rank-00000.safetensors") < before.index(f"fsync {draft}") < named
    assert "fsync .draft-1" in before[named:]
    assert power.done[visible + 1] == "fsync folder"


@pytest.mark.parametrize("cut", ["cut_before", "cut_after"])
def test_a_power_cut_at_any_operation_of_a_save_leaves_the_older_or_the_newer_checkpoint(
    tmp_path: Path, layout: Layout, power: Power, cut: str
) -> None:
    def saved_with_cut(place: int | None) -> int:
        run = tmp_path / f"{cut}-{place}"
        checkpoints = Checkpoints(_section(keep_last=1), run, layout)
        _save(checkpoints, 1)
        checkpoints.save(Note("step 2 before"), step=2, policy_version=2, epoch=1)
        begun = len(power.done)
        setattr(power, cut, None if place is None else begun + place)
        try:
            checkpoints.save(Note("step 2 again"), step=2, policy_version=2, epoch=1)
        except PowerCut:
            safe = {"step 2 before", "step 2 again"}
        else:
            safe = {"step 2 again"}
        operations = len(power.done) - begun
        setattr(power, cut, None)
        policy = Note()
        assert Checkpoints(_section(), run, layout).restore_latest(policy) == 2
        assert policy.text in safe
        if checkpoints.take_safe() == TrainState(2, 2, 1) and safe == {"step 2 again"}:
            assert policy.text == "step 2 again"
        again = Checkpoints(_section(keep_last=1), run, layout)
        _save(again, 3)
        assert again.restore_latest(policy) == 3
        assert [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith(".")] == [
            step_name(3)
        ]
        return operations

    for place in range(saved_with_cut(None)):
        saved_with_cut(place)


def test_pruning_deletes_nothing_through_a_symlink_and_keeps_no_save_from_being_safe(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    _save(checkpoints, 1)
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    (folder / step_name(1)).rename(elsewhere)
    (folder / step_name(1)).symlink_to(elsewhere)
    (folder / "step-00000000").symlink_to(tmp_path / "nowhere")
    for step in (2, 3, 4):
        _save(checkpoints, step)
        assert checkpoints.take_safe() == TrainState(step, step, 1)
    assert _names(tmp_path) == ["step-00000000", step_name(1), step_name(3), step_name(4)]
    assert (elsewhere / "manifest.json").is_file()


def test_a_draft_that_is_a_symlink_is_not_written_through(checkpoints: Checkpoints, tmp_path: Path) -> None:
    _save(checkpoints, 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "checkpoints" / ".draft-1").symlink_to(tmp_path / "mine")
    _save(checkpoints, 2)
    assert checkpoints.restore_latest(Note()) == 2
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_trainer_of_an_older_epoch_replaces_nothing(tmp_path: Path, layout: Layout) -> None:
    older, newer = (Checkpoints(_section(), tmp_path, layout) for _ in range(2))
    older.save(Note("older"), step=3, policy_version=3, epoch=1)
    newer.restore_latest(Note())
    newer.claim(2)
    for step in (3, 4):
        with pytest.raises(Fenced, match="takes checkpoints of epoch 2, and this trainer has epoch 1: a newer trainer"):
            older.save(Note("older again"), step=step, policy_version=step, epoch=1)
    newer.save(Note("newer"), step=3, policy_version=3, epoch=2)
    with pytest.raises(Fenced):
        older.save(Note("older again"), step=3, policy_version=3, epoch=1)
    assert newer.restore_latest(Note()) == 3


def test_a_save_in_the_background_that_a_newer_trainer_refuses_is_told_to_whoever_waits_for_it(
    tmp_path: Path, layout: Layout
) -> None:
    class Overtaken(Note):
        def chunks(self) -> Iterator[ShardChunk]:
            Checkpoints(_section(), tmp_path, layout).claim(2)
            yield from super().chunks()

    older = Checkpoints(_section(async_save=True), tmp_path, layout)
    older.save(Overtaken("late"), step=1, policy_version=1, epoch=1)
    with pytest.raises(Fenced):
        older.wait()
    assert _names(tmp_path) == []


def test_a_trainer_that_another_one_has_overtaken_since_it_restored_starts_again(
    tmp_path: Path, layout: Layout
) -> None:
    older, newer = (Checkpoints(_section(), tmp_path, layout) for _ in range(2))
    _save(older, 1)
    newer.restore_latest(Note())
    _save(older, 2)
    with pytest.raises(
        FailedPrecondition, match=r"has saved step-00000002 in .* while this one started: start this trainer again"
    ):
        newer.claim(2)


def test_the_trainers_of_two_runs_do_not_share_a_folder_while_both_live(tmp_path: Path, layout: Layout) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    first = Checkpoints(_section(save=tmp_path / "shared"), one, layout)
    first.claim(5)
    second = Checkpoints(_section(save=tmp_path / "shared"), other, layout)
    with pytest.raises(FailedPrecondition, match=r"run .*/one, whose trainer is running \(process \d+ on .*\)"):
        second.claim(1)
    del first  # as when its process ends
    gc.collect()
    second.claim(1)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 200_000,
        "{}",
        "null",
        '{"crc32": 1, "manifest": "text"}',
        "\0",
        lambda true: "text",
        lambda true: true | {"places": [1]},
        lambda true: true | {"step": "x"},
        lambda true: true | {"places": [true["places"][0] | {"file": "../../secret"}]},
    ],
)
def test_a_manifest_that_is_not_one_is_a_damaged_checkpoint(
    checkpoints: Checkpoints, tmp_path: Path, content: str | Callable[[Any], object]
) -> None:
    for step in (1, 2):
        _save(checkpoints, step)
    manifest = tmp_path / "checkpoints" / step_name(2) / "manifest.json"
    if not isinstance(content, str):  # whose checksum is right
        body = content(json.loads(manifest.read_text())["manifest"])
        crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        content = json.dumps({"format": 2, "crc32": crc, "manifest": body})
    manifest.write_text(content)
    assert checkpoints.restore_latest(Note()) == 1


def test_what_is_no_file_is_not_waited_for(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step in (1, 2):
        _save(checkpoints, step)
    folder = tmp_path / "checkpoints" / step_name(2)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    assert checkpoints.restore_latest(Note()) == 2
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert checkpoints.restore_latest(Note()) == 1


def test_a_checkpoint_of_an_older_headrace_is_refused_and_the_way_out_told(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    _save(checkpoints, 1)
    path = tmp_path / "checkpoints" / step_name(1) / "manifest.json"
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "format"})
    )
    with pytest.raises(
        FailedPrecondition, match=r"is a checkpoint of format 1, and this headrace reads 2: resume it with"
    ):
        checkpoints.restore_latest(Note())


@pytest.mark.parametrize(("expected", "why"), [
    (Expected((5,)), r"note/text has shape \[6\] there and \[5\] here"),
    (Expected((2, 3)), r"note/text has shape \[6\] there and \[2, 3\] here"),
    (Expected((6,), "float32"), "note/text is uint8 there and float32 here"),
])  # fmt: skip
def test_tensors_of_another_model_are_refused_by_name(checkpoints: Checkpoints, expected: Expected, why: str) -> None:
    class Reader(Note):
        def restore(self, reader: CheckpointReader) -> None:
            reader.require({"note/text": expected})

    _save(checkpoints, 1)
    with pytest.raises(DataLoss, match=f"is not of this job's model: 1 tensors differ: {why}: resume with the --hf-ch"):
        checkpoints.restore_latest(Reader())


def _names(tmp_path: Path) -> list[str]:
    """Of everything in the folder of checkpoints but its owner's files."""
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    return sorted(names - {".owner.json", ".alive", ".lock"})


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


def _section(**checkpoint: object) -> CheckpointSection:
    return CheckpointSection.model_validate(checkpoint)
