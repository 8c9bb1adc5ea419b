"""An agent with the `openai` package. It asks again if no bare number comes, three times at most."""

import re

from openai import AsyncOpenAI

END = "<|im_end|>"


async def run(args, task, base_url):
    """Plays one prompt against the session's URL, and returns the reward of all that the policy wrote."""
    question = task.prompt.rpartition("\n")[2]
    text, worth = task.prompt, 1.0
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        for turns_left in reversed(range(args.max_turns)):
            completion = await client.completions.create(model="policy", prompt=text)
            written = completion.choices[0].text
            if turns_left == 0 or re.fullmatch(r"\s*-?\d+\s*", written):
                break
            text, worth = f"{text}{written}{END}\n{question}", worth * 0.5
    return worth if written.strip() == task.label else 0.0
