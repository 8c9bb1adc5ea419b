"""A user's conversion of a step's samples to train data, and a user's log of them.

The conversion gives the rewards, masks and log-probs that the step is trained with. What the log raises is logged, and
the step is trained all the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs
from headrace.hooks.sample import Sample as HookSample
from headrace.hooks.trainer import trainer_hook
from headrace.limits import one_line
from headrace.rpc.log import log
from headrace.trajectory import Sample

_TAKEN = ("rewards", "loss_masks", "rollout_log_probs")
_EQUAL = ("tokens", "response_lengths", "total_lengths")
"""Keys that slime's conversions give as well, and that must be the samples' own: a step is planned by them."""
_UNREAD = ("raw_reward", "truncated", "sample_indices", "rollout_ids", "round_number", "metadata")
"""Keys that slime's conversions give as well, and that the trainer has from the samples."""


@dataclass(frozen=True, slots=True)
class Converted:
    """Values by sample id; `masks` (uint8 [R]) and `log_probs` (float32 [R]) only of samples where they differ."""

    rewards: dict[str, float]
    masks: dict[str, bytes]
    log_probs: dict[str, bytes]


class TrainData:
    """`f(args, samples) -> dict` of lists, one entry a sample: `rewards`, and `loss_masks` and `rollout_log_probs`.

    The rewards are what advantages are computed from, as they are: no group's mean is subtracted. Keys that the trainer
    has no use for are refused, but for those that slime's conversions always give.
    """

    def __init__(self, path: str, args: HookArgs) -> None:
        self._hook = trainer_hook(path, "train_data")
        self._args = args

    def __call__(self, samples: Sequence[Sample], seen: Sequence[HookSample]) -> Converted:
        """Raises InvalidArgument for what cannot be trained on, naming the key and the sample."""
        made = self._hook.target(self._args, list(seen))
        if not isinstance(made, Mapping):
            raise self._refused(f"returned {type(made).__name__}; it must return a dict with rewards")
        if unknown := [key for key in made if key not in (*_TAKEN, *_EQUAL, *_UNREAD)]:
            raise self._refused(
                f"returned {unknown[0]!r}, which nothing reads: it may give {', '.join(_TAKEN)}; put what a loss of "
                "yours reads into sample.train_metadata"
            )
        for key in (*_TAKEN, *_EQUAL):
            if (key in made or key == "rewards") and _length(made.get(key)) != len(samples):
                raise self._refused(f"must return {key} as a list of {len(samples)}, one entry a sample")
        self._require_equal(made, samples)
        return Converted(
            rewards={s.sample_id: self._reward(s, made["rewards"][n]) for n, s in enumerate(samples)},
            masks=self._changed(made, "loss_masks", samples),
            log_probs=self._changed(made, "rollout_log_probs", samples),
        )

    def _require_equal(self, made: Mapping[str, Any], samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples):
            own = (sample.tokens.tolist(), sample.response_length, len(sample.tokens))
            for key, value in zip(_EQUAL, own, strict=True):
                if key in made and _plain(made[key][number]) != value:
                    raise self._refused(
                        f"changed {key} of sample {sample.sample_id}: tokens are as they were generated; a generate "
                        "function may return others"
                    )

    def _reward(self, sample: Sample, value: Any) -> float:
        try:
            reward = float(value)
        except (TypeError, ValueError):
            reward = np.nan
        if not np.isfinite(reward):
            raise self._refused(f"gave sample {sample.sample_id} the reward {value!r}; it must be a finite number")
        return reward

    def _changed(self, made: Mapping[str, Any], key: str, samples: Sequence[Sample]) -> dict[str, bytes]:
        found = {}
        for number, sample in enumerate(samples if key in made else ()):
            own = sample.loss_mask if key == "loss_masks" else sample.rollout_log_probs
            row = row_like(own, made[key][number], f"hook {self._hook.path} gave {key} of sample {sample.sample_id}")
            if not np.array_equal(row, own):
                found[sample.sample_id] = row.tobytes()
        return found

    def _refused(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"hook {self._hook.path} {what}")


def row_like(own: NDArray[Any], given: Any, what: str) -> NDArray[Any]:
    """A user's values in the place of a sample's own mask (uint8) or log-probs (float32), [R].

    Raises InvalidArgument, which begins with `what`, unless they are as many, and zeros and ones or finite.
    """
    try:
        row = np.asarray(_plain(given), np.float64)
    except (TypeError, ValueError):
        row = np.empty((0, 0))
    is_mask = own.dtype == np.uint8
    if row.shape != own.shape or not (np.isin(row, (0, 1)).all() if is_mask else np.isfinite(row).all()):
        raise InvalidArgument(f"{what} that are not {len(own)} {'zeros and ones' if is_mask else 'finite numbers'}")
    return row.astype(own.dtype)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, Sized) else None


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


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

    def __call__(self, step: int, samples: Sequence[HookSample]) -> tuple[dict[str, float], bool]:
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
