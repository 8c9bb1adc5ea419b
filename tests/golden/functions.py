"""Users' functions of the golden jobs: they use nothing but what docs/hooks.md promises."""

from __future__ import annotations

from typing import Any

from headrace.hooks.kit import generate_single


async def even(args: Any, sample: Any, **kwargs: Any) -> float:
    """The share of the response's characters with an even code: of random text, about half."""
    return sum(ord(letter) % 2 == 0 for letter in sample.response) / max(len(sample.response), 1)


async def with_tool(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
    """A call of a tool, its result, and what the policy says then."""
    conversation = [{"role": "user", "content": sample.prompt}]
    for _ in range(3):
        said = await generate_single(conversation)
        conversation.append({"role": "assistant", "content": said})
        if "<<" not in said:
            break
        conversation.append({"role": "tool", "content": f"result {len(said)}"})
    sample.response = said
    return sample


async def agent(args: Any, task: Any, base_url: str) -> float:
    """Three turns over OpenAI's protocol, from a prompt of messages; the reward counts the words of the last."""
    from openai import AsyncOpenAI

    messages = list(task.prompt)
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        for turn in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"again {turn}"}]
    return len(said.split()) / 4
