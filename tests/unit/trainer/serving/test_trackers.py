"""Trackers, the real packages without a network: what they have afterwards, and what they must not have."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.job.schema.run import passwords, without_secrets
from headrace.sample_log import Answer, SampleLog
from services.trainer.control.build import TrainerBuild
from services.trainer.serving import trackers
from tests.support.ledgers.answers import answered

TIMES = {"time/step_seconds": 2.0, "time/wait_seconds": 0.5, "time/backward_seconds": 1.0}
NUM_SAMPLES = 40
REWARD = "reward/mean"
FILTERED = "samples/filtered/reason/too long, (x)"


def job(**tracking: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": "/none"}, "tracking": tracking, "run": {"run_name": "mine"}})


def train(asked: Job, folder: Path, *, after: int, steps: Sequence[int]) -> None:
    """One start of a trainer: it writes a step's samples before the next step's row."""
    report = TrainerBuild(asked, folder).report()
    report.resume(after)
    for step in steps:
        samples = [answered(f"g/{n}", response=f" {n}", reward=n / 10, label="4") for n in range(NUM_SAMPLES)]
        answers = [Answer.of(sample, step) for sample in samples]
        SampleLog(folder / "samples").write_step(step, 0, answers, 1 << 20)
        report.write(step, TIMES | {REWARD: step / 2, FILTERED: 1.0})
    report.close()


@dataclass
class Kept:
    """What a tracker has, read by its own means."""

    runs: set[str] = field(default_factory=set)
    rewards: dict[int, float] = field(default_factory=dict)
    """By step"""
    rollouts: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    """Response and reward, by step"""
    project: str = ""


def in_tensorboard(folder: Path) -> Kept:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    kept = Kept({"one"}, {each.step: each.value for each in events.Scalars(REWARD)})
    for each in events.Tensors("rollouts/text_summary"):
        texts = each.tensor_proto.string_val[0].decode().split("\n\n---\n\n")
        said = [(text.rpartition("assistant:\n\n    ")[2], text.partition("**reward** ")[2]) for text in texts]
        kept.rollouts[each.step] = [(response, float(rest.partition(",")[0])) for response, rest in said]
    return kept


def in_wandb(folder: Path) -> Kept:
    from wandb.proto.wandb_internal_pb2 import Record

    kept = Kept()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in map(Record.FromString, _log_records(file.read_bytes())):
            if record.HasField("run"):
                kept.runs.add(record.run.run_id)
                kept.project = record.run.project
            row = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if REWARD in row:
                kept.rewards[record.history.step.num] = float(row[REWARD])
    for file in folder.glob("wandb/offline-run-*/files/media/table/rollouts_*.table.json"):
        table = json.loads(file.read_text())
        _add_rows(kept, [dict(zip(table["columns"], row, strict=True)) for row in table["data"]])
    return kept


def _log_records(log: bytes) -> Iterator[bytes]:
    """W&B's file: blocks of 32 KiB after 7 bytes, in which a record has a CRC, a length and the part that it is."""
    offset, parts = 7, b""
    while offset + 7 <= len(log):
        if (left := -offset % 32768) < 7:
            offset += left
        length, part = struct.unpack("<HB", log[offset + 4 : offset + 7])
        parts += log[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if part in (1, 4):  # whole, or the last one
            yield parts
            parts = b""


def in_trackio(folder: Path) -> Kept:
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_run_records("sums")
    kept = Kept({str(run["id"]) for run in runs}, project="sums")
    kept.rewards = {row["step"]: row[REWARD] for row in SQLiteStorage.get_logs("sums", "mine") if REWARD in row}
    for trace in SQLiteStorage.get_traces("sums", "mine"):
        rollout = (trace["messages"][1]["content"], trace["metadata"]["reward"])
        kept.rollouts.setdefault(trace["step"], []).append(rollout)
    return kept


def in_mlflow(folder: Path) -> Kept:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.absolute()}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("headrace")
    runs = client.search_runs([experiment.experiment_id])
    kept = Kept({run.info.run_id for run in runs}, project=experiment.name)
    (run,) = runs
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params["rollout.num_rollout"]
    kept.rewards = {each.step: each.value for each in client.get_metric_history(run.info.run_id, REWARD)}
    for file in client.list_artifacts(run.info.run_id, "rollouts"):
        with open(client.download_artifacts(run.info.run_id, file.path), newline="") as table:
            _add_rows(kept, csv.DictReader(table))
    return kept


def _add_rows(kept: Kept, rows: Any) -> None:
    for row in rows:
        kept.rollouts.setdefault(int(row["step"]), []).append((row["response"], float(row["reward"])))


READ: Mapping[str, tuple[Callable[[Path], Kept], dict[str, object]]] = {
    "tensorboard": (in_tensorboard, {"use_tensorboard": True}),
    "wandb": (in_wandb, {"use_wandb": True, "wandb_mode": "offline"}),
    "trackio": (in_trackio, {"use_trackio": True, "trackio_project": "sums"}),
    "mlflow": (in_mlflow, {"use_mlflow": True}),
}


def test_every_tracker_is_read_back_here() -> None:
    assert set(READ) == set(trackers._TRACKERS)


@pytest.fixture(scope="module", params=list(READ))
def tracked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kept, Path]]:
    """Two starts of one run, with keys in the job and in the environment; the second repeats step 2."""
    name = request.param
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    read, options = READ[name]
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))  # read when trackio is imported
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("JUDGE_API_KEY", "sk-very-secret")
        patch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setattr(trackers, "_CLOSE_SECONDS", 120.0)  # a busy machine imports slowly
        asked = job(**{"use_tensorboard": False} | options)
        keys = {"api_key": "sk-in-the-job", "url": "http://user:hunter2@judge.example/v1", "tp_size": 77}
        asked = asked.model_copy(update={"sglang": keys})
        train(asked, folder, after=0, steps=[1, 2])
        train(asked, folder, after=1, steps=[2, 3])
        if name == "wandb":
            import wandb

            wandb.teardown()  # its process writes behind our back until it ends
        yield read(folder), folder


def test_each_tracker_has_every_step_in_one_run_after_a_restart(tracked: tuple[Kept, Path]) -> None:
    kept, _ = tracked
    assert kept.rewards == {1: 0.5, 2: 1.0, 3: 1.5}
    assert len(kept.runs) == 1


def test_each_tracker_has_the_best_the_worst_and_others_of_a_steps_rollouts(tracked: tuple[Kept, Path]) -> None:
    kept, _ = tracked
    assert sorted(kept.rollouts) == [1, 2, 3]
    chosen = kept.rollouts[3]
    assert len(chosen) == trackers.MAX_ROLLOUTS < NUM_SAMPLES
    assert {(" 0", 0.0), (" 39", 3.9)} <= set(chosen)
    assert all(float(response) == pytest.approx(reward * 10) for response, reward in chosen)


def test_no_tracker_gets_a_key(tracked: tuple[Kept, Path]) -> None:
    kept, folder = tracked
    written = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert not kept.project or b"judge.example" in written
    for secret in (b"0123456789abcdef", b"sk-very-secret", b"sk-in-the-job", b"hunter2"):
        assert secret not in written


def test_a_runs_rows_are_in_its_folder_and_in_tensorboard(tmp_path: Path) -> None:
    train(job(), tmp_path, after=0, steps=[1])
    assert in_tensorboard(tmp_path).rewards == {1: 0.5}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_is_asked_for_the_jobs_project_group_and_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at where they leave us: W&B's file has the whole job in it, so their being there shows nothing."""
    asked: dict[str, object] = {}
    monkeypatch.setattr("wandb.init", lambda **words: asked.update(words))
    names = {"wandb_project": "p", "wandb_group": "g", "wandb_team": "t"}
    train(job(use_wandb=True, wandb_mode="offline", use_tensorboard=False, **names), tmp_path, after=0, steps=[])
    assert (asked["project"], asked["group"], asked["entity"]) == ("p", "g", "t")


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None if package == name else "there")
    with pytest.raises(ConfigError, match=rf"headrace\[{name}\]"):
        TrainerBuild(job(**{f"use_{name}": True}), tmp_path).report()


@dataclass
class Scripted:
    """A tracker that a test steers. Each start of it is a new one."""

    opened: list[int] = field(default_factory=list)
    """The steps at which it was opened"""
    logged: list[int] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)
    """Steps whose first call fails"""
    is_closed: bool = False
    may_go: Event = field(default_factory=Event)

    def open(self, run: trackers.TrackedRun) -> Scripted:
        self.opened.append(run.step)
        return self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.may_go.wait(60)
        if step in self.failing:
            self.failing.remove(step)
            raise OSError("no space left on device")
        self.logged.append(step)

    def log_rollouts(self, step: int, rollouts: Sequence[Answer]) -> None:
        assert rollouts

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    tracker = Scripted()
    monkeypatch.setitem(trackers._TRACKERS, "tensorboard", tracker.open)
    yield tracker
    tracker.may_go.set()


def test_a_tracker_that_fails_is_warned_about_once_and_opened_again(scripted: Scripted, tmp_path: Path) -> None:
    scripted.failing = {2, 3}
    scripted.may_go.set()
    with capture_logs() as logged:
        train(job(), tmp_path, after=0, steps=[1, 2, 3, 4])
    assert scripted.logged == [1, 4]
    assert scripted.opened == [0, 1, 1]  # each time after the last step that it has
    assert scripted.is_closed
    (warning,) = [line for line in logged if line["event"] == "tracker_failed"]
    assert "no space left" in warning["error"]
    (total,) = [line for line in logged if line["event"] == "tracker_incomplete"]
    assert (total["missed_calls"], total["closed"]) == (2, True)


def test_a_tracker_that_cannot_be_opened_stops_nothing(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: trackers.TrackedRun) -> Scripted:
        raise ConnectionError("nobody is there")

    monkeypatch.setitem(trackers._TRACKERS, "tensorboard", refuse)
    with capture_logs() as logged:
        train(job(), tmp_path, after=0, steps=[1])
    assert [line["event"] for line in logged].count("tracker_failed") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_tracker_that_hangs_costs_the_training_nothing_but_the_deadline_at_the_end(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "MAX_WAITING", 3)
    with capture_logs() as logged:
        train(job(), tmp_path, after=0, steps=[1, 2, 3, 4, 5])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    (total,) = [line for line in logged if line["event"] == "tracker_incomplete"]
    assert not total["closed"]
    assert total["missed_calls"] >= 6  # of ten: one hangs and three wait at most
    assert [line["event"] for line in logged].count("tracker_failed") == 1


def test_secrets_are_known_by_their_names_and_by_their_place_in_a_url() -> None:
    open_ = {"input_key": "prompt", "plain": "http://host:80/path@2", "max_tokens": 5}
    tree = open_ | {"hf_token": "b", "nested": [{"password": "c", "url": "postgresql://me:d@host/db"}]}
    hidden = open_ | {"hf_token": "***", "nested": [{"password": "***", "url": "postgresql://***@host/db"}]}
    assert without_secrets(tree) == hidden
    assert passwords(tree) == ["url"]
