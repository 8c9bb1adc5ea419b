"""`headrace eval` of weights that no run serves: which job its services get."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.commands.evaluate import serving
from headrace.cli.main import main
from headrace.job.schema.job import Job


def test_services_that_evaluate_train_on_nothing_and_are_nobody_elses(tmp_path: Path) -> None:
    job = Job.model_validate(
        {
            "model": {"hf_checkpoint": "trained"},
            "data": {"prompt_data": ["a.jsonl"], "prompt_data_weights": [1.0], "label_key": "answer"},
            "services": {"rollout_address": "127.0.0.1:1", "reward_address": "127.0.0.1:2"},
            "buffer": {"buffer_shards": 2},
            "reward": {"rm_type": "math"},
        }
    )
    alone = serving(job, tmp_path, hf_checkpoint=tmp_path / "weights")
    assert (alone.model.hf_checkpoint, alone.run.run_dir) == (tmp_path / "weights", tmp_path)
    assert (alone.data.prompt_data, alone.data.prompt_data_weights) == ((), ())
    assert (alone.services.rollout_address, alone.services.reward_address) == (None, None)
    assert (alone.buffer.buffer_shards, alone.buffer.buffer_store) == (1, "memory")
    assert (alone.data.label_key, alone.reward.rm_type) == ("answer", "math")


def test_a_folder_without_data_says_how_to_name_some(
    tmp_path: Path, load_with, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = load_with().model.hf_checkpoint
    assert main(["eval", "--hf-checkpoint", str(checkpoint), "--rm-type", "math"]) != 0
    assert "no data to evaluate on" in capsys.readouterr().err
