"""An agent that knows a URL and OpenAI's protocol, and nothing else: it asks again where no number comes.

headrace train examples/quickstart/job.toml --agent-function-path examples/agents/asks_again.py:run --max-turns 3
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

RIGHT_BUT_NOT_BARE = 0.3
EACH_FURTHER_TURN = 0.5


async def run(args: Any, task: Any, base_url: str) -> float:
    """Plays one prompt. The reward that it returns is that of all that the policy said."""
    question = task.prompt.rsplit("\n", 1)[-1].removesuffix(" =")
    messages: list[Any] = [{"role": "user", "content": f"What is {question}? Answer with the number alone."}]
    worth = 1.0
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = (answer.choices[0].message.content or "").strip()
            if (number := re.search(r"-?\d+", said)) or len(messages) > 2 * (args.max_turns or 2) - 2:
                break
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "Only the number."},
            ]
            worth *= EACH_FURTHER_TURN
    if number is None or number.group() != task.label:
        return 0.0
    return worth if said == task.label else worth * RIGHT_BUT_NOT_BARE
