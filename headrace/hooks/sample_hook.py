"""A user's functions that see each generated sample before it is scored, and may change it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.load import Hook
from headrace.hooks.sample import Sample
from headrace.hooks.signature import awaited, load_function, takes

ACCEPTED = ("def f(args, sample, *, evaluation=False, **kwargs) -> Sample | None",)
_EVALUATION = "evaluation"


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
    return load_function(path, ACCEPTED, (2,), (_EVALUATION,))
