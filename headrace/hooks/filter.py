"""Dynamic sampling filters: a user's function that keeps or drops a scored group, and the one that most people want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.sample import Sample
from headrace.hooks.signature import awaited, load_function

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
    load_function(path, ACCEPTED, (2,))


async def run_filter(path: str, args: HookArgs, samples: Sequence[Sample]) -> tuple[bool, str]:
    """(keep, reason). Runs in a worker. Raises InvalidArgument for any other return."""
    answer = await awaited(load_function(path, ACCEPTED, (2,)).target(args, list(samples)))
    if isinstance(answer, bool):
        return answer, ""
    if not isinstance(answer, DynamicFilterOutput):
        raise InvalidArgument(
            f"hook {path} returned {type(answer).__name__}; it must return a bool or a DynamicFilterOutput"
        )
    return answer.keep, answer.reason or ""
