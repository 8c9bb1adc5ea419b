"""A model folder that is whole by its file names, and a job file to break."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.job.load.load import load
from headrace.job.schema.job import Job

Load = Callable[..., Job]

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"weight": {"dtype": "F32", "shape": [10, 100], "data_offsets": [0, 4000]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4000))
    return folder


@pytest.fixture
def job_file(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
[model]
hf_checkpoint = "{model}"

[rollout]
rollout_batch_size = 4
n_samples_per_prompt = 8
rollout_stop = ["a", "b"]

[train]
num_steps_per_rollout = 2

[megatron]
lr = 2e-5
"""
    )
    return path


@pytest.fixture
def load_with(job_file: Path) -> Load:
    """`load_with("--flag", …, HEADRACE_X="…")`: the job file with flags and variables on top."""

    def loaded(*flags: str, **environment: str) -> Job:
        return load(job_file, flags, environment)

    return loaded
