"""A user's log of a step's samples. What it raises is logged, and the step is trained all the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.hooks import HookArgs
from headrace.hooks.sample import Sample
from headrace.hooks.trainer import trainer_hook
from headrace.rpc.log import log
from headrace.wire.checks import one_line


class RolloutLog:
    """`f(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool`, on rank 0.

    Numbers that it puts into `rollout_extra_metrics` are reported with the step, where they have a name of their own.
    `rollout_time`: seconds since the batch before, or since the trainer was built.
    """

    def __init__(self, path: str, args: HookArgs, clock: Callable[[], float] = time.monotonic) -> None:
        self._hook = trainer_hook(path, "rollout_log")
        self._args = args
        self._clock = clock
        self._before = clock()

    def __call__(self, step: int, samples: Sequence[Sample]) -> tuple[dict[str, float], bool]:
        """The numbers to report, and True when trackers need no other figures of the rollout."""
        now, extra = self._clock(), dict[str, Any]()
        seconds, self._before = now - self._before, now
        try:
            is_logged = bool(self._hook.target(step, self._args, list(samples), extra, seconds))
        except Exception as error:  # noqa: BLE001  # a user's code
            log.warning("rollout_log_failed", step=step, hook=self._hook.path, error=one_line(str(error)))
            is_logged = False
        return numbers(self._hook.path, extra), is_logged


def numbers(path: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are finite numbers; names the others in the log."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(name, str) and math.isfinite(number):
            found[name] = number
        else:
            log.warning("metric_left_out", hook=path, name=str(name), value=one_line(repr(value)))
    return found
