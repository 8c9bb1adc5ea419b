"""A user's function that is shown all samples of a step, those of groups that were filtered out too."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.hooks.args import HookArgs
from headrace.hooks.load import Hook
from headrace.hooks.rollout.data_source import LedgerDataSource
from headrace.hooks.rollout.messages import Order, OrderRefused, Reply
from headrace.hooks.sample import Sample
from headrace.hooks.signature import Signature, awaited, load_function

ACCEPTED = ("def f(args, all_samples, data_source) -> None",)
_POSITIONAL = (3,)


def load_all_samples(path: str) -> None:
    """Runs in a worker. Raises ConfigError for what cannot be loaded or called."""
    load_function(path, ACCEPTED, _POSITIONAL)


def is_all_samples(hook: Hook) -> bool:
    """True for the argument names of slime's functions."""
    return Signature.of(hook.target).required[:2] == ("args", "all_samples")


async def run_all_samples(path: str, args: HookArgs, groups: Sequence[Sequence[Sample]]) -> None:
    """Runs in a worker. What the function changes in the samples is not read."""
    hook = load_function(path, ACCEPTED, _POSITIONAL)
    await awaited(hook.target(args, [list(group) for group in groups], LedgerDataSource(args, _too_late)))


def _too_late(order: Order) -> Reply:
    return OrderRefused("the groups are in the ledger already, which alone gives and takes them")
