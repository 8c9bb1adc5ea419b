"""Runs of generation alone and of training alone: what they need, what they start, and what they leave out."""

from __future__ import annotations

from pathlib import Path

from headrace.job.rules.rules import warnings
from headrace.job.rules.scope import Scope, services_here

STEPS = ("--load-debug-rollout-data", "kept/{rollout_id}.samples")


def test_training_alone_needs_steps(load_with) -> None:
    job = load_with("--debug-train-only", *STEPS)
    assert services_here(job) == ["trainer"]
    assert job.debug.load_debug_rollout_data == str(Path.cwd() / "kept/{rollout_id}.samples")
    assert services_here(load_with(*STEPS)) == ["trainer"], "as in slime, the steps say so by themselves"


def test_generation_alone_admits_every_step_of_the_first_version(load_with) -> None:
    assert load_with("--debug-rollout-only", "--num-rollout", "7").buffer.max_staleness == 7
    assert load_with("--debug-rollout-only", "--num-rollout", "7", "--max-staleness", "9").buffer.max_staleness == 9
    assert "rollout" in Scope.of_train(load_with("--debug-rollout-only")).services


def test_what_is_left_out_is_said(load_with, tmp_path: Path) -> None:
    data = tmp_path / "eval.jsonl"
    data.write_text('{"prompt": "a", "label": "b"}\n')
    (said,) = warnings(load_with(*STEPS, "--eval-prompt-data", "sums", str(data)))
    assert said.startswith("nothing is evaluated")
    (said,) = warnings(load_with("--debug-rollout-only", "--save-hf", str(tmp_path / "exported")))
    assert said.startswith("nothing is exported")
