"""An agent that knows a URL and OpenAI's protocol, and nothing else: where no bare number comes, it asks again.

headrace train examples/quickstart/job.toml --agent-function-path examples/agents/asks_again.py:run --max-turns 3
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

RIGHT_BUT_NOT_BARE = 0.3
EACH_FURTHER_TURN = 0.5
END = "<|im_end|>"


async def run(args: Any, task: Any, base_url: str) -> float:
    """Plays one prompt. The reward that it returns is that of all that the policy said."""
    question = task.prompt.rpartition("\n")[2]
    text, worth = task.prompt, 1.0
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        for turns_left in reversed(range(args.max_turns or 2)):
            answer = await client.completions.create(model="policy", prompt=text)
            said = answer.choices[0].text
            if turns_left == 0 or re.fullmatch(r"\s*-?\d+\s*", said):
                break
            text, worth = f"{text}{said}{END}\n{question}", worth * EACH_FURTHER_TURN
    if said.strip() == task.label:
        return worth
    first = re.match(r"\s*(-?\d+)", said)
    return worth * RIGHT_BUT_NOT_BARE if first and first[1] == task.label else 0.0
