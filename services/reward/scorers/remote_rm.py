"""A reward server of the user's own: `--rm-url` is sent prompt, response and label, and answers the reward.

The request is `{"prompt", "response", "label", "metadata"}`, the answer a number, an object of numbers (with
`--reward-key`), or `{"reward": …}` or `{"score": …}` around either.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs, Reward
from headrace.hooks.reward import checked_reward
from headrace.score import ScoreItem
from services.reward.post import post


async def score(item: ScoreItem, args: HookArgs) -> Reward:
    """Raises InvalidArgument without --rm-url and for an answer that is no reward, OSError while nobody answers."""
    if args.rm_url is None:
        raise InvalidArgument("scorer remote_rm has no server to ask: set --rm-url")
    asked = {
        "prompt": item.prompt,
        "response": item.response,
        "label": item.label,
        "metadata": dict(item.metadata),
    }
    answer = await post(args.rm_url, asked, seconds=args.reward_timeout_seconds)
    reward = checked_reward(args.rm_url, _inner(answer))
    if isinstance(reward, str):
        raise InvalidArgument(reward.removeprefix("hook "))
    return reward


def _inner(answer: Any) -> Any:
    if isinstance(answer, dict):
        for name in ("reward", "score"):
            if isinstance(answer.get(name), int | float | dict) and len(answer) == 1:
                return answer[name]
    return answer
