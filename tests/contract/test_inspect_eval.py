"""Inspect evaluates the policy behind the OpenAI-compatible endpoint, from a Python of its own.

`make examples` sets that Python up and names it in HEADRACE_INSPECT_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.support.agents import AGENT, producing
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE

PYTHON = os.environ.get("HEADRACE_INSPECT_PYTHON")
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sums():
    samples = [Sample(input="2 + 2?", target=""), Sample(input="3 + 3?", target="no such text")]
    return Task(dataset=samples, solver=generate(), scorer=includes())
"""


@pytest.mark.skipif(PYTHON is None, reason="long: make examples sets HEADRACE_INSPECT_PYTHON")
@pytest.mark.timeout(300)
async def test_inspect_scores_what_the_policy_says(tmp_path: Path, unused_tcp_port: int) -> None:
    (tmp_path / "sums.py").write_text(TASK)
    url = {"HEADRACE_BASE_URL": f"http://127.0.0.1:{unused_tcp_port}/v1", "HEADRACE_API_KEY": "none"}
    words = ("sums.py", "--model", "openai-api/headrace/policy", "--log-format", "json", "--log-dir", "logs")
    engine = FakeEngine(WIRE)
    async with producing(
        tmp_path, AGENT, lambda job: lambda number: engine, num_prompts=0, openai_port=unused_tcp_port
    ):
        command = (str(PYTHON), "-m", "inspect_ai", "eval", *words, "--display", "plain")
        inspect = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env={**os.environ, **url})
        assert await inspect.wait() == 0
    (file,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(file.read_text())
    assert log["status"] == "success"
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 0.5
    said = [sample["output"]["choices"][0]["message"]["content"] for sample in log["samples"]]
    assert all(said)  # what the engine wrote
