"""A job that the services refuse does not replace the job that the run has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.job.schema.job import Job
from headrace.run_folder import RunFolder

FAKE_SERVICE = Path(__file__).parents[1] / "launch" / "fake_service.py"


@pytest.fixture
def resumed(job_file: Path, tmp_path: Path, load_with: Callable[..., Job]) -> Callable[..., tuple[int, Job]]:
    """Starts a run with `flags` first and with others again, with a checkpoint between, and returns what came of it.

    The trainer is alone, on recorded steps. `trainer` is the script that plays it.
    """
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    (recorded / "0.samples").touch()
    steps = ("--load-debug-rollout-data", f"{recorded}/{{rollout_id}}.samples", "--num-rollout", "9")
    common = (*steps, "--run-dir", str(tmp_path / "runs"), "--use-fault-tolerance")

    def start(before: str, after: str, trainer: str) -> tuple[int, Job]:
        run = RunFolder(tmp_path / "runs" / "run")
        run.create(load_with(*common, *before.split()))
        (run.path / "checkpoints" / "step-00000004").mkdir(parents=True)
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{trainer}\n")
        python.chmod(0o755)
        code = main(["train", str(job_file), *common, *after.split(), "--trainer-python", str(python)])
        return code, run.job()

    return start


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("--lora-rank 8", "--lora-rank 16", "lora_rank 8 there, 16 here"),
        ("", "--advantage-estimator ppo --critic-lr 1e-5", "advantage_estimator grpo there, ppo here"),
    ],
)
def test_a_refused_resume_leaves_the_runs_job_and_names_what_differs(
    resumed: Callable[..., tuple[int, Job]],
    capsys: pytest.CaptureFixture[str],
    load_with: Callable[..., Job],
    before: str,
    after: str,
    named: str,
) -> None:
    code, job = resumed(before, after, "echo 'trainer: the checkpoint is of another model' >&2; exit 2")
    assert code == 1
    was = load_with(*before.split())
    assert (job.lora, job.train, job.megatron, job.critic) == (was.lora, was.train, was.megatron, was.critic)
    assert named in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("after", ["--lr 1e-4", "--kl-loss-coef 0.2 --use-kl-loss", "--num-rollout 12"])
def test_a_resume_that_is_accepted_is_the_runs_job(
    resumed: Callable[..., tuple[int, Job]], tmp_path: Path, load_with: Callable[..., Job], after: str
) -> None:
    (tmp_path / "done").touch()
    serve = f"exec {sys.executable} {FAKE_SERVICE} --children {tmp_path}/children --exit-when {tmp_path}/done"
    trainer = f'while [ "$1" != --address ]; do shift; done; {serve} --address "$2"'
    code, job = resumed("", after, trainer)
    assert code == 0
    wanted = load_with("--num-rollout", "9", *after.split())
    assert (job.megatron, job.train, job.rollout) == (wanted.megatron, wanted.train, wanted.rollout)
