"""`headrace runs`: the list, and two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.job.load.load import read
from headrace.run_folder import MetricsRow, RunFolder, ServiceEntry


def a_run(folder: Path, name: str, rewards: list[float], *flags: str) -> RunFolder:
    job = read(None, ["--hf-checkpoint", "model", "--run-dir", str(folder), "--run-name", name, *flags], {})
    run = RunFolder.of(job)
    run.create(job)
    run.write_services({"trainer": ServiceEntry("127.0.0.1:1", None, None)})
    rows = [
        MetricsRow(step, float(step), {"reward/mean": each, "grad_norm": 1.0}) for step, each in enumerate(rewards, 1)
    ]
    rows.append(MetricsRow(0, 0.0, {"eval/sums": 0.5}))
    rows.append(MetricsRow(len(rewards), 9.0, {"eval/sums": rewards[-1]}))
    run.metrics.write_text("".join(json.dumps(row.fields()) + "\n" for row in rows))
    return run


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["runs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_run_says_how_far_it_came_and_what_it_earned(tmp_path, capsys):
    a_run(tmp_path, "short", [0.1, 0.2], "--num-rollout", "5")
    a_run(tmp_path, "long", [0.0, 0.3, 0.6, 0.9, 0.9, 0.9], "--num-rollout", "6")
    found = {each["name"]: each for each in listed(capsys, "--run-dir", str(tmp_path))}
    assert (found["short"]["state"], found["short"]["step"], found["short"]["num_steps"]) == ("interrupted", 2, 5)
    assert found["long"]["state"] == "finished"
    assert found["long"]["last_reward"] == pytest.approx(0.9)
    assert found["long"]["evaluations"] == {"eval/sums": [0.5, 0.9]}


def test_two_runs_are_compared_by_option_and_by_metric(tmp_path, capsys):
    a_run(tmp_path, "a", [0.1, 0.2, 0.3], "--lr", "1e-6")
    a_run(tmp_path, "b", [0.4, 0.5, 0.6], "--lr", "2e-6")
    found = listed(capsys, "a", "b", "--run-dir", str(tmp_path))
    assert [each for each in found["job"] if each["flag"] == "--lr"] == [{"flag": "--lr", "values": ["1e-6", "2e-6"]}]
    assert found["metrics"]["reward/mean"] == [pytest.approx(0.2), pytest.approx(0.5)]


def test_a_folder_without_runs_is_no_error(tmp_path, capsys):
    assert main(["runs", "--run-dir", str(tmp_path)]) == 0
    assert str(tmp_path) in capsys.readouterr().out


def test_one_run_cannot_be_compared(tmp_path):
    assert main(["runs", "only", "--run-dir", str(tmp_path)]) == 2
