"""A user's log of an evaluation's samples. What it raises is a warning: an evaluation ends no run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.hooks import HookArgs, to_hook
from headrace.hooks.trainer import trainer_hook
from headrace.trajectory import Sample, Status
from headrace.wire.checks import one_line
from services.trainer.rl.rollout_log import numbers

_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Logged:
    """`metrics` are the user's own; `alone` is True when trackers need no others; `warnings` are for a person."""

    metrics: dict[str, float] = field(default_factory=dict)
    alone: bool = False
    warnings: tuple[str, ...] = ()


class EvaluationLog:
    """`f(rollout_id, args, data, extra_metrics) -> bool`, in a thread of rank 0, for ten minutes at most.

    `data` has for each set by name `rewards`, `truncated` and `samples`, a list each; samples that failed are left out.
    """

    def __init__(self, path: str, args: HookArgs) -> None:
        self._hook = trainer_hook(path, "eval_log")
        self._args = args

    async def __call__(self, step: int, samples: Iterable[sample_pb2.Sample]) -> Logged:
        """Raises nothing."""
        extra: dict[str, Any] = {}
        try:
            data = _by_set([Sample.unpack(one) for one in samples])
            called = asyncio.to_thread(self._hook.target, step, self._args, data, extra)
            alone = bool(await asyncio.wait_for(called, _SECONDS))
        except Exception as error:  # noqa: BLE001  # a user's code
            why = f"took longer than {_SECONDS:g} s" if isinstance(error, TimeoutError) else repr(error)
            return Logged(warnings=(f"{self._hook.path} could not log the evaluation: {one_line(why)}",))
        return Logged(numbers(self._hook.path, extra), alone)


def _by_set(samples: Iterable[Sample]) -> dict[str, dict[str, list[Any]]]:
    """`group_id` is eval/NAME/row."""
    found: dict[str, dict[str, list[Any]]] = {}
    for sample in samples:
        if sample.status is Status.FAILED:
            continue
        name = sample.group_id.removeprefix("eval/").rsplit("/", 1)[0]
        row = found.setdefault(name, {"rewards": [], "truncated": [], "samples": []})
        row["rewards"].append(sample.reward)
        row["truncated"].append(sample.status is Status.TRUNCATED)
        row["samples"].append(to_hook(sample))
    return found
