"""Evaluations of a whole run: beside its training, in its folder, and of its checkpoint after it has ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.sample_log import SampleLog
from tests.e2e.test_whole_runs import started
from tests.long_forms import whole_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CONFIG = """
[defaults]
n_samples_per_eval_prompt = 4
temperature = 1.0
max_response_len = 6

[[datasets]]
name = "often"
path = "often.jsonl"
interval = 1

[[datasets]]
name = "last"
path = "last.jsonl"
n_samples_per_eval_prompt = 2
"""


@whole_run
async def test_a_run_is_evaluated_beside_its_training_and_its_checkpoint_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, num_rows in (("often", 4), ("last", 3)):
        lines = (json.dumps({"prompt": f"{number} + {number} =", "label": "x"}) for number in range(num_rows))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "eval.toml").write_text(CONFIG)
    flags = ("--num-rollout", "3", "--save-interval", "1", "--eval-config", str(tmp_path / "eval.toml"))
    async with started(tmp_path, *flags, "--max-staleness", "1") as run:
        await run.finished()
    folder = str(run.folder.path)
    rows = [row for row in run.metrics() if "eval/often" in row]
    assert rows[-1]["step"] == 3
    for row in rows:
        assert row["eval_min_version/often"] <= row["eval_max_version/often"] <= 3
        assert row["eval_pass/often@1"] <= row["eval_pass/often@2"] <= row["eval_pass/often@4"]
        assert row["eval_low/often"] <= row["eval/often"] <= row["eval_high/often"]
    assert (rows[-1]["eval_min_version/last"], rows[-1]["eval_max_version/last"]) == (3, 3), "nothing trains any more"
    assert [row["step"] for row in run.metrics() if "eval/last" in row] == [0, 3]
    samples = list(SampleLog(run.folder.samples).of_evaluation(3))
    assert len(samples) == 4 * 4 + 3 * 2
    mean = sum(s.reward or 0.0 for s in samples if s.group_id.startswith("eval/often/")) / 16
    assert mean == pytest.approx(rows[-1]["eval/often"]), "the samples are those behind the number"
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["eval", "--history", folder]) == 0
    assert "often" in capsys.readouterr().out
    assert (run.folder.path / "evaluations.png").stat().st_size > 1000
    words = ["eval", folder, "--step", "2", "--samples", str(tmp_path / "samples.jsonl")]
    assert await asyncio.to_thread(main, words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "evaluating the checkpoint of step 2" in said
    assert "eval/often: mean reward" in said
    assert "over 16 samples of 4 prompts (0 failed)" in said
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 16 + 6
