"""Dynamic sampling filters: a user's function that keeps or drops a scored group, and the one that most people want."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.load import Hook, load_hook
from headrace.hooks.sample import Sample
from headrace.hooks.signature import Signature, wrong_signature

ALL_REWARDS_ARE = "all rewards are "
"""Begins the reason of `check_reward_nonzero_std`, and of a filter that gives none and drops equal rewards."""
ACCEPTED = ("def f(args, samples, **kwargs) -> bool | DynamicFilterOutput",)


@dataclass
class DynamicFilterOutput:
    """Returned by a filter instead of a bool."""

    keep: bool
    reason: str | None = None


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ: equal ones teach GRPO nothing."""
    rewards = {sample.get_reward_value(args) for sample in samples if sample.status is not Sample.Status.FAILED}
    keep = len(rewards) > 1
    return DynamicFilterOutput(keep, None if keep else f"{ALL_REWARDS_ARE}{next(iter(rewards), None)}")


def load_filter(path: str) -> None:
    """Runs in a worker. Raises ConfigError for what cannot be loaded or called."""
    _filter(path)


async def run_filter(path: str, args: HookArgs, samples: Sequence[Sample]) -> tuple[bool, str]:
    """(keep, reason). Runs in a worker. Raises InvalidArgument for any other return."""
    answer = _filter(path).target(args, list(samples))
    if inspect.isawaitable(answer):
        answer = await answer
    if isinstance(answer, bool):
        return answer, ""
    if not isinstance(answer, DynamicFilterOutput):
        raise InvalidArgument(
            f"hook {path} returned {type(answer).__name__}; it must return a bool or a DynamicFilterOutput"
        )
    return answer.keep, answer.reason or ""


def _filter(path: str) -> Hook:
    hook = load_hook(path)
    signature = Signature.of(hook.target)
    if len(signature.required) != 2 or signature.required_keywords:
        raise wrong_signature(hook.path, hook.target, ACCEPTED)
    return hook
