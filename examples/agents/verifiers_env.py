"""An environment of the package `verifiers` as an agent: it plays a prompt with a tool, its rubric gives the reward.

The package needs another `openai` than SGLang does, so it is played by an agent host in a Python of its own:

    headrace init sums && cd sums
    headrace train --agent-hosts --agent-function-path verifiers_env.py:run --max-turns 4
    .venv-verifiers/bin/headrace agent
"""

from __future__ import annotations

from functools import cache
from typing import Any

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def is_right(completion: list[Any], answer: str) -> float:
    """1 where the last message has the answer in it."""
    return float(answer in str(completion[-1].get("content")))


@cache
def environment() -> vf.ToolEnv:
    """Tasks come from headrace: the data set is here because an environment has one."""
    unused = Dataset.from_list([{"question": "1 + 1?", "answer": "2"}])
    return vf.ToolEnv(dataset=unused, tools=[add], rubric=vf.Rubric(funcs=[is_right]), max_turns=4)


async def run(args: Any, task: Any, base_url: str) -> float:
    """Plays one prompt. What goes wrong in the environment is the sample's failure."""
    prompt = task.prompt if isinstance(task.prompt, list) else [{"role": "user", "content": task.prompt}]
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as http:
        client = OpenAIChatCompletionsClient(http)
        row = {"prompt": prompt, "answer": task.label or "", "example_id": task.index}
        played = await environment().run_rollout(row, client, model="policy", sampling_args={})
    if played.get("error"):
        raise RuntimeError(f"the environment failed: {played['error']}")
    return float(played["reward"])
