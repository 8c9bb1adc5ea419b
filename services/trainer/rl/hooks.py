"""User functions inside the trainer, with slime's arguments. They run in the rank's compute thread, on its tensors.

Rank 0 alone runs those that see all samples of a rollout batch, once, and tells the others what changed. In slime's
order: the sample filter; the conversion to train data, or the reward post-process; the log. The conversion gives the
rewards, masks and log-probs that the step is trained with. What the log raises is logged, and the step is trained all
the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs, to_hook
from headrace.hooks.load import Hook
from headrace.hooks.sample import Sample as HookSample
from headrace.hooks.trainer import trainer_hook
from headrace.limits import one_line
from headrace.rpc.log import log
from headrace.trajectory import Sample, Status
from services.trainer.megatron.parallel import Layout, told
from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.inputs import MicroInputs


class RolloutData(dict[str, Any]):
    """slime's `rollout_data`: a list a key, one entry a sample of this rank; per-token entries are tensors [R]."""

    @classmethod
    def of(cls, micros: Sequence[MicroInputs]) -> RolloutData:
        """The data of these micro-batches, as far as it is known before advantages are."""
        samples = [sample for micro in micros for sample in micro.samples]
        data = cls(of_samples(samples))
        data["rewards"] = [reward for micro in micros for reward in micro.rewards]
        data["loss_masks"] = _cut(micros, "mask")
        data["rollout_log_probs"] = _cut(micros, "rollout_log_probs")
        return data

    def per_token(self, key: str, micros: Sequence[MicroInputs]) -> list[Tensor]:
        """The hook's tensors under `key`. Raises InvalidArgument unless it is one finite tensor [R] a sample."""
        lengths = [sample.response_length for micro in micros for sample in micro.samples]
        return per_token(f"rollout_data[{key!r}]", self.get(key), lengths)


def per_token(name: str, found: Any, lengths: Sequence[int]) -> list[Tensor]:
    """A hook's value for each sample. Raises InvalidArgument unless it is one finite tensor [R] a sample."""
    if not isinstance(found, list | tuple) or len(found) != len(lengths):
        raise InvalidArgument(f"the hook must give {name} as a list of {len(lengths)} tensors")
    for index, (tensor, length) in enumerate(zip(found, lengths, strict=True)):
        if not isinstance(tensor, Tensor) or tensor.shape != (length,):
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidArgument(f"{name}[{index}] is {shape}, must be {[length]}")
        if not torch.isfinite(tensor).all():
            raise InvalidArgument(f"{name}[{index}] is not finite")
    return [tensor.float() for tensor in found]


def of_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """The samples' own data as hooks see them; `metadata` is train_metadata, as in slime."""
    return {
        "tokens": [torch.from_numpy(s.tokens.astype("int64")) for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "raw_reward": [s.reward for s in samples],
        "truncated": [int(s.status is Status.TRUNCATED) for s in samples],
        "sample_indices": [s.sample_id for s in samples],
        "rollout_ids": [s.rollout_id or s.sample_id for s in samples],
        "metadata": [dict(s.train_metadata) for s in samples],
        "sample_metadata": [dict(s.metadata) for s in samples],
    }


def changed_by(hook: Callable[[RolloutData], None], micros: Sequence[MicroInputs]) -> list[MicroInputs]:
    """The micro-batches with the advantages and returns that a function of the rollout's data left."""
    data = RolloutData.of(micros)
    data["advantages"], data["returns"] = _cut(micros, "advantages"), _cut(micros, "returns")
    hook(data)
    return put_back(micros, data.per_token("advantages", micros), data.per_token("returns", micros))


def put_back(
    micros: Sequence[MicroInputs], advantages: Sequence[Tensor], returns: Sequence[Tensor]
) -> list[MicroInputs]:
    """The micro-batches with the advantages and returns of their samples, one tensor a sample, in order."""
    found, start = [], 0
    for micro in micros:
        end = start + len(micro.samples)
        found.append(replace(micro, advantages=micro.put(advantages[start:end]), returns=micro.put(returns[start:end])))
        start = end
    return found


def bound(path: str | None, kind: str, args: HookArgs) -> Callable[..., Any] | None:
    """A user's function with its first argument, `args`; None without one."""
    return None if path is None else partial(trainer_hook(path, kind).target, args)


def _cut(micros: Sequence[MicroInputs], name: str) -> list[Tensor]:
    return [part for micro in micros for part in micro.copies(getattr(micro, name))]


_TAKEN = ("rewards", "loss_masks", "rollout_log_probs")
_EQUAL = ("tokens", "response_lengths", "total_lengths")
"""Keys that slime's conversions give as well, and that must be the samples' own: a step is planned by them."""
_UNREAD = ("raw_reward", "truncated", "sample_indices", "rollout_ids", "round_number", "metadata")
"""Keys that slime's conversions give as well, and that the trainer has from the samples."""


class TrainData:
    """`f(args, samples) -> dict` of lists, one entry a sample: `rewards`, and `loss_masks` and `rollout_log_probs`.

    The rewards are what advantages are computed from, as they are: no group's mean is subtracted. Keys that the trainer
    has no use for are refused, but for those that slime's conversions always give.
    """

    def __init__(self, path: str, args: HookArgs) -> None:
        self._hook = trainer_hook(path, "train_data")
        self._args = args

    def __call__(self, samples: Sequence[Sample], seen: Sequence[HookSample]) -> BatchChanges:
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
        return BatchChanges(
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


FetchWhole = Callable[[Sequence[str]], list[Sample]]


class BatchChanges(msgspec.Struct, frozen=True, array_like=True):
    """Values by sample id; a sample that is in none of them keeps its own."""

    rewards: dict[str, float] | None = None
    """What the estimator starts from, of every sample that has a reward; None: the estimator's own."""
    masks: dict[str, bytes] = {}
    """uint8 [R]"""
    log_probs: dict[str, bytes] = {}
    """float32 [R]"""
    metrics: dict[str, float] = {}
    is_logged: bool = False
    """The user's function has logged the rollout: trackers are not given its figures as well."""

    def of_sample(self, sample: Sample) -> Sample:
        mask, log_probs = self.masks.get(sample.sample_id), self.log_probs.get(sample.sample_id)
        if mask is not None:
            sample = replace(sample, loss_mask=np.frombuffer(mask, np.uint8))
        if log_probs is not None:
            sample = replace(sample, rollout_log_probs=np.frombuffer(log_probs, np.float32))
        return sample

    def of_facts(self, facts: SampleFacts) -> SampleFacts:
        mask = self.masks.get(facts.sample_id)
        if mask is None:
            return facts
        return replace(facts, trained_tokens=sum(mask if facts.prompt_length else mask[1:]))

    def reward_of_each(self, samples: Sequence[SampleFacts]) -> dict[str, float] | None:
        """The reward of every sample, 0 for those that failed or have none; None: the estimator's own."""
        if self.rewards is None:
            return None
        return {sample.sample_id: self.rewards.get(sample.sample_id, 0.0) for sample in samples}


_changes = msgspec.msgpack.Decoder(BatchChanges)


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """All samples that did not fail, in the order of the batch, and as hooks see them."""

    samples: Sequence[Sample]
    seen: Sequence[HookSample]

    @classmethod
    def of(cls, samples: Sequence[SampleFacts], fetch: FetchWhole) -> WholeBatch:
        """Fetches them. Raises InvalidArgument for one that cannot be read."""
        facts = [sample for sample in samples if sample.status != Status.FAILED.value]
        numbers = {group_id: n for n, group_id in enumerate(dict.fromkeys(s.group_id for s in facts))}
        whole = fetch([sample.sample_id for sample in facts])
        return cls(whole, [to_hook(sample, numbers[sample.group_id]) for sample in whole])

    def groups(self) -> list[list[HookSample]]:
        found: dict[str, list[HookSample]] = {}
        for sample, seen in zip(self.samples, self.seen, strict=True):
            found.setdefault(sample.group_id, []).append(seen)
        return list(found.values())

    def changed_masks(self, path: str) -> dict[str, bytes]:
        """Masks that a function has changed, those of samples that it set remove_sample on among them."""
        found = {}
        for sample, seen in zip(self.samples, self.seen, strict=True):
            given = seen.loss_mask if seen.loss_mask is not None else sample.loss_mask
            mask = row_like(sample.loss_mask, given, f"hook {path} gave loss_mask of sample {sample.sample_id} values")
            mask = np.zeros_like(mask) if seen.remove_sample else mask
            if not np.array_equal(mask, sample.loss_mask):
                found[sample.sample_id] = mask.tobytes()
        return found


class WholeBatchHooks:
    """The job's hooks of this kind, by path; each may be None."""

    def __init__(
        self,
        layout: Layout,
        args: HookArgs,
        *,
        sample_filter: str | None = None,
        train_data: str | None = None,
        reward_post_process: str | None = None,
        rollout_log: str | None = None,
    ) -> None:
        self._layout = layout
        self._args = args
        self._sample_filter = trainer_hook(sample_filter, "sample_filter") if sample_filter else None
        self._train_data = TrainData(train_data, args) if train_data else None
        self._post_process = trainer_hook(reward_post_process, "reward_post_process") if reward_post_process else None
        self._rollout_log = RolloutLog(rollout_log, args) if rollout_log else None

    def __call__(self, step: int, samples: Sequence[SampleFacts], fetch: FetchWhole) -> BatchChanges:
        """Collective: what the functions changed, equal on all ranks."""
        mine = msgspec.msgpack.encode(self._run(step, samples, fetch)) if self._layout.rank == 0 else b""
        found: BatchChanges = _changes.decode(told(mine, self._layout))
        return found

    def _run(self, step: int, samples: Sequence[SampleFacts], fetch: FetchWhole) -> BatchChanges:
        """Raises InvalidArgument for what a function must not return."""
        batch, changes = WholeBatch.of(samples, fetch), BatchChanges()
        if self._sample_filter is not None:
            self._sample_filter.target(self._args, batch.groups())
            masks = batch.changed_masks(self._sample_filter.path)
            removed = sum(sample.remove_sample for sample in batch.seen)
            changes = msgspec.structs.replace(changes, masks=masks, metrics={"samples/removed": float(removed)})
        if self._train_data is not None:
            made = self._train_data(batch.samples, batch.seen)
            changes = msgspec.structs.replace(
                changes, rewards=made.rewards, masks=changes.masks | made.masks, log_probs=made.log_probs
            )
        elif self._post_process is not None:
            changes = msgspec.structs.replace(changes, rewards=self._post_processed(self._post_process, batch))
        if self._rollout_log is not None:
            metrics, is_logged = self._rollout_log(step, batch.seen)
            changes = msgspec.structs.replace(changes, metrics=changes.metrics | metrics, is_logged=is_logged)
        return changes

    def _post_processed(self, hook: Hook, batch: WholeBatch) -> dict[str, float]:
        pairs = zip(batch.samples, batch.seen, strict=True)
        scored = [(sample.sample_id, seen) for sample, seen in pairs if sample.reward is not None]
        answer = hook.target(self._args, [seen for _, seen in scored])
        rewards = answer[1] if isinstance(answer, tuple) and len(answer) == 2 else None
        if rewards is None or len(rewards) != len(scored):
            raise InvalidArgument(f"hook {hook.path} must return (raw rewards, rewards), {len(scored)} numbers each")
        found = {sample_id: float(reward) for (sample_id, _), reward in zip(scored, rewards, strict=True)}
        if not all(math.isfinite(reward) for reward in found.values()):
            raise InvalidArgument(f"hook {hook.path} returned a reward that is not finite")
        return found
