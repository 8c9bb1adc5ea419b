"""Calls a user's function with the sample that it expects. Runs in a worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.hooks import HookArgs, NoReward, Reward, RewardForm, Sample, run_reward
from headrace.score import ScoreItem


async def run_custom(
    path: str, form: RewardForm, args: HookArgs, items: Sequence[ScoreItem]
) -> list[Reward | NoReward]:
    """Returns one reward an item, or why it has none. Raises the function's error, or InvalidArgument."""
    return await run_reward(path, form, args, [_sample(i, item) for i, item in enumerate(items)])


def _sample(index: int, item: ScoreItem) -> Sample:
    return Sample(
        index=index,
        prompt=_prompt(item.prompt),
        response=item.response,
        response_length=item.response_tokens,
        label=item.label,
        status=Sample.Status(item.status or "completed"),
        metadata=dict(item.metadata),
    )


def _prompt(text: str) -> str | list[dict[str, Any]]:
    """Returns messages when the prompt is a JSON array of them, else the text itself."""
    if not text.startswith("[{"):
        return text
    try:
        messages = json.loads(text)
    except ValueError:
        return text
    is_chat = all(isinstance(m, dict) and "role" in m for m in messages)
    return messages if is_chat else text
