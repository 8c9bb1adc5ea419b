"""Frameworks for agents play a task in a session, from a Python of their own, each by the dialect that it speaks.

`make examples` sets that Python up and names it in HEADRACE_FRAMEWORKS_PYTHON.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.hooks.agent import Task
from headrace.hooks.agent_command import played
from headrace.models.starter import NAME, cache_folder
from tests.support.scripted_endpoint import serving

MODEL = cache_folder() / NAME
JOB = """
[run]
run_name = "frameworks"
[model]
hf_checkpoint = "{model}"
[data]
prompt_data = "train.jsonl"
label_key = "label"
metadata_key = "metadata"
[reward]
rm_type = "random"
[rollout]
num_rollout = 2
rollout_batch_size = {count}
n_samples_per_prompt = 2
rollout_max_response_len = 24
max_turns = 3
agent_command = "{python} {here}/play.py"
[train]
micro_batch_size = 1
[megatron]
lr = 1e-6
[placement]
actor_num_gpus_per_node = 1
rollout_num_gpus = 1
[sglang]
max_running_requests = 16
max_total_tokens = 65536
"""
PLAYS = """
import json, os, runpy, sys

task = json.loads(os.environ["HEADRACE_TASK"])
script, *words = task["metadata"]["plays"].split()
sys.argv = [script, task["prompt"], *words]
runpy.run_path(script, run_name="__main__")
"""
FRAMEWORKS = [
    ("with_openai_agents", "", True),
    ("with_pydantic_ai", "anthropic:policy", True),
    ("with_pydantic_ai", "openai-chat:policy", False),
    ("with_pydantic_ai", "openai-responses:policy", True),
    ("with_smolagents", "", False),
    ("with_langgraph", "openai", False),
    ("with_langgraph", "anthropic", True),
]
PYTHON = os.environ.get("HEADRACE_FRAMEWORKS_PYTHON")
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
ADDS = '<tool_call>\n{"name": "add",  "arguments": {"a": 2, "b": 2}}\n</tool_call>'
ENDS = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "4"}}\n</tool_call>'
THINKS = "<think>\nI add {}.\n</think>\n\n"


@pytest.mark.skipif(PYTHON is None, reason="long: make examples sets HEADRACE_FRAMEWORKS_PYTHON")
@pytest.mark.parametrize(("example", "word", "thinks"), FRAMEWORKS)
async def test_a_framework_calls_its_tool_and_all_that_the_policy_said_is_trained_once(
    tmp_path: Path, example: str, word: str, thinks: bool
) -> None:
    command = f"{shlex.quote(str(PYTHON))} {EXAMPLES / example}.py {{prompt}} {word}"
    ends = ENDS if example == "with_smolagents" else "It is 4."
    steps = [(THINKS.format(n) if thinks else "") + said for n, said in enumerate((ADDS, ADDS, ends))]
    async with serving(tmp_path, "qwen3") as served:
        served.script.says = lambda prompt: steps[min(len(served.script.generations), len(steps) - 1)]
        async with played(command, Task("What is 2 + 2?"), f"{served.url}/v1") as left:
            assert "4" in left.output_file.read_text()
    branches = served.opened.record.branches()
    generations = [made for _, made in served.script.generations]
    assert len(generations) == len(steps)
    assert sum(sum(branch.loss_mask) for branch in branches) == sum(len(made.tokens) for made in generations)
    rewrites = example == "with_smolagents"  # it writes its calls into the history in a form of its own
    assert len(branches) == (len(steps) if rewrites else 1)


@pytest.mark.skipif(PYTHON is None, reason="long: make examples sets HEADRACE_FRAMEWORKS_PYTHON")
@pytest.mark.timeout(1800)
def test_each_framework_is_trained_for_two_steps_and_no_sample_is_lost(tmp_path: Path) -> None:
    job = JOB.format(model=MODEL, count=len(FRAMEWORKS), python=Path(str(PYTHON)).absolute(), here="{here}")
    (tmp_path / "job.toml").write_text(job)
    (tmp_path / "play.py").write_text(PLAYS)
    rows = [
        {"prompt": "What is 2 + 2?", "label": "4", "metadata": {"plays": f"{EXAMPLES / example}.py {word}"}}
        for example, word, _ in FRAMEWORKS
    ]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    headrace = [sys.executable, "-m", "headrace.cli.main"]
    subprocess.run([*headrace, "train", "job.toml"], cwd=tmp_path, check=True)
    trained = [
        json.loads(line) for line in (tmp_path / "runs" / "frameworks" / "trained.jsonl").read_text().splitlines()
    ]
    groups = [{sample_id.split("/")[1] for sample_id in step["sample_ids"]} for step in trained]
    assert [len(each) for each in groups] == [len(FRAMEWORKS)] * 2
    audited = subprocess.run([*headrace, "audit"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "lost, doubled, unaccounted: 0 0 0" in audited
