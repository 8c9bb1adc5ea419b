"""User functions that get samples before they are stored: filters, sample hooks, functions for a whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.load import Hook, Signature, awaited, load_function, takes
from headrace.hooks.rollout.data_source import LedgerDataSource
from headrace.hooks.rollout.messages import Order, OrderRefused, Reply
from headrace.hooks.sample import Sample

ALL_REWARDS_ARE = "all rewards are "
"""Begins the reason of `check_reward_nonzero_std`, and of a filter that gives none and drops equal rewards."""
_FILTER = ("def f(args, samples, **kwargs) -> bool | DynamicFilterOutput",)
_SAMPLE_HOOK = ("def f(args, sample, *, evaluation=False, **kwargs) -> Sample | None",)
_ALL_SAMPLES = ("def f(args, all_samples, data_source) -> None",)
_EVALUATION = "evaluation"


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
    load_function(path, _FILTER, (2,))


async def run_filter(path: str, args: HookArgs, samples: Sequence[Sample]) -> tuple[bool, str]:
    """(keep, reason). Runs in a worker. Raises InvalidArgument for any other return."""
    answer = await awaited(load_function(path, _FILTER, (2,)).target(args, list(samples)))
    if isinstance(answer, bool):
        return answer, ""
    if not isinstance(answer, DynamicFilterOutput):
        raise InvalidArgument(
            f"hook {path} returned {type(answer).__name__}; it must return a bool or a DynamicFilterOutput"
        )
    return answer.keep, answer.reason or ""


def load_sample_hook(path: str) -> None:
    """Runs in a worker. Raises ConfigError for what cannot be loaded or called."""
    _hook(path)


async def run_sample_hooks(paths: Sequence[str], args: HookArgs, sample: Sample, evaluation: bool) -> Sample:
    """Calls the functions one after the other; None keeps the sample, which may have been changed in place.

    Runs in a worker. Raises InvalidArgument for any other return.
    """
    for path in paths:
        hook = _hook(path)
        options = {_EVALUATION: evaluation} if takes(hook, _EVALUATION) else {}
        made = await awaited(hook.target(args, sample, **options))
        if made is None:
            continue
        if not isinstance(made, Sample):
            raise InvalidArgument(f"hook {path} returned {type(made).__name__}; it must return the sample, or None")
        sample = made
    return sample


def _hook(path: str) -> Hook:
    return load_function(path, _SAMPLE_HOOK, (2,), (_EVALUATION,))


def load_all_samples(path: str) -> None:
    """Runs in a worker. Raises ConfigError for what cannot be loaded or called."""
    load_function(path, _ALL_SAMPLES, (3,))


def is_all_samples(hook: Hook) -> bool:
    """True for the argument names of slime's functions."""
    return Signature.of(hook.target).required[:2] == ("args", "all_samples")


async def run_all_samples(path: str, args: HookArgs, groups: Sequence[Sequence[Sample]]) -> None:
    """Runs in a worker. What the function changes in the samples is not read."""
    hook = load_function(path, _ALL_SAMPLES, (3,))
    await awaited(hook.target(args, [list(group) for group in groups], LedgerDataSource(args, _too_late)))


def _too_late(order: Order) -> Reply:
    return OrderRefused("the groups are in the ledger already, which alone gives and takes them")
