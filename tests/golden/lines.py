"""What command lines resolve to, or how they are refused: lines.txt has them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError

ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent
"""Its examples are those of the recorded commit, which lines.txt names."""
_JOB = """
[model]
hf_checkpoint = "{folder}/model"

[data]
prompt_data = "{folder}/prompts.jsonl"
label_key = "label"

[rollout]
rollout_batch_size = 8
n_samples_per_prompt = 4

[reward]
rm_type = "math"
"""
_FILES = {
    "job.toml": _JOB,
    "functions.py": "async def reward(args, sample): ...\nasync def generate(args, sample, sampling_params): ...\n"
    "async def run(args, task, base_url): ...\n",
    "wrong-section.toml": _JOB + "\n[rollouts]\nnum_rollout = 3\n",
    "wrong-key.toml": _JOB + "\n[megatron]\nlearning_rate = 1e-6\n",
    "wrong-type.toml": _JOB + "\n[train]\nmicro_batch_size = 'two'\n",
}


def resolved_lines(folder: Path) -> dict[str, Any]:
    """Each line → the job, as JSON has it, or its refusal. Paths of the folder and of the tree are words in both."""
    from tests.support.models.tiny_model import make_tiny_qwen3

    make_tiny_qwen3(folder / "model", seed=3)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"What is {i} + 1?", "label": str(i + 1)}) + "\n" for i in range(16))
    )
    for name, text in _FILES.items():
        (folder / name).write_text(text.format(folder=folder))
    lines = [line for line in Path(__file__).with_name("lines.txt").read_text().splitlines() if line and line[0] != "#"]
    return {line: _resolved(shlex.split(line.format(folder=folder)), folder) for line in lines}


def _resolved(argv: Sequence[str], folder: Path) -> Any:
    names = {str(folder): "{folder}", str(_HERE): "{tree}", str(ROOT): "{tree}"}
    before, here = {name: value for name, value in os.environ.items() if name.startswith("HEADRACE_")}, Path.cwd()
    for name in before:
        del os.environ[name]
    os.chdir(_HERE)
    try:
        return {"job": json.loads(_replaced(json.dumps(_job_of(argv)), names))}
    except HeadraceError as error:
        return {"refused": type(error).__name__, "names": _named(argv, _replaced(str(error), names), names)}
    finally:
        os.chdir(here)
        os.environ.update(before)


def _job_of(argv: Sequence[str]) -> Any:
    """The only lines that know the product's modules. Raises ConfigError."""
    from headrace.cli.job_arguments import load_job

    return json.loads(load_job(argv).model_dump_json())


def _named(argv: Sequence[str], message: str, names: Mapping[str, str]) -> list[str]:
    """The words of the command line that the refusal repeats: the flag, as flag or as option, and the value."""
    words = [word for each in argv for word in _replaced(each, names).split("=")]
    said = message.replace("-", "_")
    return [word for word in words if len(word) > 1 and word.removeprefix("--").replace("-", "_") in said]


def _replaced(text: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text
