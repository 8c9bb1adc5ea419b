"""User functions that see all samples of a rollout batch. Rank 0 runs them, once, and tells the others what changed.

In slime's order: the sample filter; the conversion to train data, or the reward post-process; the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs, to_hook
from headrace.hooks.load import Hook
from headrace.hooks.sample import Sample as HookSample
from headrace.hooks.trainer import trainer_hook
from headrace.trajectory import Sample, Status
from services.trainer.megatron.parallel import Layout, told
from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.train_data import RolloutLog, TrainData, row_like

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
        """The sample with what was changed."""
        mask, log_probs = self.masks.get(sample.sample_id), self.log_probs.get(sample.sample_id)
        if mask is not None:
            sample = replace(sample, loss_mask=np.frombuffer(mask, np.uint8))
        if log_probs is not None:
            sample = replace(sample, rollout_log_probs=np.frombuffer(log_probs, np.float32))
        return sample

    def of_facts(self, facts: SampleFacts) -> SampleFacts:
        """The facts of the sample with what was changed."""
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
        """The samples of each prompt."""
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
        """The rewards of the samples that have one, as the function makes them."""
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
