"""TensorBoard and W&B (offline, no network): what arrives there, and what must not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace.job.schema.job import Job
from headrace.job.schema.run import passwords, without_secrets
from services.trainer.control.build import TrainerBuild

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
TIMES = {"time/step_seconds": 2.0, "time/wait_seconds": 0.5, "time/backward_seconds": 1.0}


def job(**tracking: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": "/none"}, "tracking": tracking, "run": {"run_name": "mine"}})


async def test_a_runs_rows_are_in_its_folder_and_in_tensorboard(tmp_path: Path) -> None:
    report = TrainerBuild(job(), tmp_path).report()
    report.resume(0)
    report.write(1, TIMES | {"reward/mean": 0.5})
    report.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5)]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@needs_wandb
async def test_wandb_gets_metrics_and_the_job_but_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("JUDGE_API_KEY", "sk-very-secret")
    names = {"wandb_project": "my-project", "wandb_group": "my-group", "wandb_team": "my-team"}
    asked = job(use_wandb=True, wandb_mode="offline", use_tensorboard=False, **names)
    asked = asked.model_copy(
        update={"sglang": {"api_key": "sk-in-the-job", "url": "http://user:hunter2@judge.example/v1", "tp_size": 77}}
    )
    report = TrainerBuild(asked, tmp_path).report()
    report.resume(0)
    report.write(1, {"reward/mean": 0.5})
    report.close()
    wandb.teardown()  # its process writes behind our back until it ends
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    (its_file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert all(name in its_file.read_bytes() for name in (b"reward/mean", b"hf_checkpoint", b"num_rollout"))
    assert b"judge.example" in written
    assert all(name.encode() in written for name in names.values())
    for secret in (b"0123456789abcdef", b"sk-very-secret", b"sk-in-the-job", b"hunter2"):
        assert secret not in written


@needs_wandb
def test_wandb_is_asked_for_the_jobs_project_group_and_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at where they leave us: W&B's file has the whole job in it, so their being there shows nothing."""
    asked: dict[str, object] = {}
    monkeypatch.setattr("wandb.init", lambda **words: asked.update(words))
    names = {"wandb_project": "p", "wandb_group": "g", "wandb_team": "t"}
    TrainerBuild(job(use_wandb=True, wandb_mode="offline", use_tensorboard=False, **names), tmp_path).report().resume(0)
    assert (asked["project"], asked["group"], asked["entity"]) == ("p", "g", "t")


def test_secrets_are_known_by_their_names_and_by_their_place_in_a_url() -> None:
    open_ = {"input_key": "prompt", "plain": "http://host:80/path@2", "max_tokens": 5}
    tree = open_ | {"hf_token": "b", "nested": [{"password": "c", "url": "postgresql://me:d@host/db"}]}
    hidden = open_ | {"hf_token": "***", "nested": [{"password": "***", "url": "postgresql://***@host/db"}]}
    assert without_secrets(tree) == hidden
    assert passwords(tree) == ["url"]
