"""The returns of rollout functions, under slime's names; plain lists and dicts are read as the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.sample import Sample

_TRAIN = "a list of groups of samples, or RolloutFnTrainOutput(samples, metrics)"
_EVAL = 'a dict {name: {"rewards": […], "truncated": […], "samples": […]}}, or RolloutFnEvalOutput(data, metrics)'


@dataclass
class RolloutFnTrainOutput:
    """The groups that are to be trained, and numbers for the log."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """`data` holds for each data set `rewards`, one a sample, and optionally `truncated` and `samples`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def train_output(path: str, returned: Any) -> RolloutFnTrainOutput:
    """Reads what a function has returned. Raises InvalidArgument for anything else."""
    samples = getattr(returned, "samples", returned)
    if not isinstance(samples, list):
        raise InvalidArgument(f"hook {path} returned {type(samples).__name__}; it must return {_TRAIN}")
    return RolloutFnTrainOutput(samples, _metrics(returned))


def eval_output(path: str, returned: Any) -> RolloutFnEvalOutput:
    """Reads what a function has returned from an evaluation. Raises InvalidArgument for anything else."""
    data = getattr(returned, "data", returned)
    if not isinstance(data, dict) or not all(isinstance(each, Mapping) for each in data.values()):
        raise InvalidArgument(f"hook {path} returned {type(data).__name__} from an evaluation; it must return {_EVAL}")
    return RolloutFnEvalOutput(data, _metrics(returned))


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the metrics that are numbers, by their names."""
    return {
        str(name): float(value)
        for name, value in (metrics or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _metrics(returned: Any) -> dict[str, Any] | None:
    metrics = getattr(returned, "metrics", None)
    return metrics if isinstance(metrics, dict) else None
