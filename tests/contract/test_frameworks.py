"""Frameworks for agents play a task in a session, from a Python of their own, each by the dialect that it speaks.

`make examples` sets that Python up and names it in HEADRACE_FRAMEWORKS_PYTHON.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from headrace.hooks.agent import Task
from headrace.hooks.agent_command import played
from tests.support.scripted_endpoint import serving

PYTHON = os.environ.get("HEADRACE_FRAMEWORKS_PYTHON")
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
ADDS = '<tool_call>\n{"name": "add",  "arguments": {"a": 2, "b": 2}}\n</tool_call>'
ENDS = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "4"}}\n</tool_call>'
THINKS = "<think>\nI add {}.\n</think>\n\n"


@pytest.mark.skipif(PYTHON is None, reason="long: make examples sets HEADRACE_FRAMEWORKS_PYTHON")
@pytest.mark.parametrize(
    ("example", "word", "thinks"),
    [
        ("with_openai_agents", "", True),
        ("with_pydantic_ai", "anthropic:policy", True),
        ("with_pydantic_ai", "openai-chat:policy", False),
        ("with_pydantic_ai", "openai-responses:policy", True),
        ("with_smolagents", "", False),
        ("with_langgraph", "openai", False),
        ("with_langgraph", "anthropic", True),
    ],
)
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
