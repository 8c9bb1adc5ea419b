"""Calls a user's function with the sample that it expects. Runs in a worker."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs, NoReward, Reward, RewardForm, Sample, run_reward
from headrace.prompts.label import label_for_hooks
from headrace.sample_checks import LOSS_MASK, ROLLOUT_LOG_PROBS, TOKENS
from headrace.score import ScoreItem
from headrace.wire.checks import require_bytes
from headrace.wire.json_text import from_json, to_json
from headrace.wire.limits import MAX_JSON_BYTES


@dataclass(frozen=True, slots=True)
class CustomResult:
    """A reward, or why there is none, and the item's metadata if the function changed it."""

    reward: Reward | NoReward
    metadata: dict[str, Any] | None = None


async def run_custom(path: str, form: RewardForm, args: HookArgs, items: Sequence[ScoreItem]) -> list[CustomResult]:
    """Returns one result an item. Raises the function's error, or InvalidArgument."""
    samples = [_sample(i, item) for i, item in enumerate(items)]
    rewards = await run_reward(path, form, args, samples)
    return [_result(path, *each) for each in zip(rewards, samples, items, strict=True)]


def _result(path: str, reward: Reward | NoReward, sample: Sample, item: ScoreItem) -> CustomResult:
    try:
        if not isinstance(sample.metadata, dict):
            raise InvalidArgument(f"{type(sample.metadata).__name__} is no dict")
        text = to_json(sample.metadata)
        require_bytes(len(text.encode()), MAX_JSON_BYTES, "metadata")
    except InvalidArgument as error:
        return CustomResult(f"hook {path} left metadata that cannot be stored: {error.message}")
    return CustomResult(reward, None if text == to_json(item.metadata) else from_json(text))


def _sample(index: int, item: ScoreItem) -> Sample:
    sample = Sample(
        index=index if item.index is None else item.index,
        prompt=_prompt(item.prompt),
        response=item.response,
        response_length=item.response_tokens,
        label=label_for_hooks(item.label, item.hook_fields),
        status=Sample.Status(item.status or "completed"),
        metadata=copy.deepcopy(dict(item.metadata)),
    )
    if item.columns:
        sample.tokens = item.columns[TOKENS].tolist()
        sample.loss_mask = item.columns[LOSS_MASK].tolist()
        sample.rollout_log_probs = item.columns[ROLLOUT_LOG_PROBS].tolist()
    return sample


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
