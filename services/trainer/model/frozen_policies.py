"""Policies that are not trained: the reference, a teacher and older versions, as copies in the host's memory.

A copy takes the model's place for a forward pass. The old policy is the one before this rollout step's first optimizer
step or, with keep_old_actor, for each sample the one that its oldest token came from. Before the first optimizer step
the current policy is the old one, so what its training pass finds is what a pass of its own would: that pass is
skipped, unless advantages ask for it.

With keep_old_actor a version is remembered when its weights are published: before the step that follows. It is let go
when no sample that the ledger still admits can be so old. Saved with the checkpoint: a resumed run gets the same old
samples again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.job.schema.training import TrainSection, trains_on_old_log_probs
from services.trainer.checkpoint.manifest import ShardChunk
from services.trainer.checkpoint.resharding import CheckpointReader, ModelState
from services.trainer.hugging_face.shards import ModelShard
from services.trainer.megatron.parallel import Layout
from services.trainer.megatron.routing_replay import Routing
from services.trainer.model.lora import PolicyWeights
from services.trainer.model.pipeline import Pipeline
from services.trainer.rl.inputs import MicroInputs, StepInputs, filled


class HostCopy:
    """A copy of everything in `weights` at the moment it is made, or taken again."""

    def __init__(self, weights: Mapping[str, Tensor], shards: Sequence[ModelShard] = ()) -> None:
        """`shards` are the weights' places in a checkpoint."""
        self._weights = weights
        self._shards = shards
        self._values = {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}

    def take(self) -> None:
        for name, weight in self._weights.items():
            self._values[name].copy_(weight.detach())

    def put(self) -> None:
        """Copies the weights into the model, for good."""
        with torch.no_grad():
            for name, value in self._values.items():
                self._weights[name].copy_(value)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has these weights inside the block, and its own again after it."""
        current = HostCopy(self._weights)
        self.put()
        try:
            yield
        finally:
            current.put()

    def state(self, name: str) -> ModelState:
        """The part `name` of a checkpoint: this copy's values in the model's places."""
        names = {id(weight): name for name, weight in self._weights.items()}
        shards = [replace(shard, parameter=self._values[names[id(shard.parameter)]]) for shard in self._shards]
        return ModelState(name, shards, None)


def frozen_policy(weights: PolicyWeights, folder: Path | None) -> HostCopy:
    """A copy of a Hugging Face folder's weights, or of the initial ones; with LoRA of the adapters alone."""
    if folder is None:
        return HostCopy(weights.changing, weights.changing_shards)
    current = HostCopy(weights.named)
    weights.become(folder)
    found = HostCopy(weights.named, weights.shards)
    current.put()
    return found


_PART = "old-"


class OldPolicies:
    """`capacity` published versions at most, the newest among them."""

    def __init__(
        self, weights: Mapping[str, Tensor], shards: Sequence[ModelShard], *, capacity: int, publish_interval: int
    ) -> None:
        self._weights = weights
        self._shards = shards
        self._capacity = capacity
        self._publish_interval = publish_interval
        self._was_asked = False
        self._copies: dict[int, HostCopy] = {}

    @property
    def versions(self) -> list[int]:
        """Oldest first; the same on every rank."""
        return sorted(self._copies)

    def remember(self, step: int) -> None:
        """Called before a step: keeps the weights if they were just published, or if the trainer just started."""
        if step % self._publish_interval and self._was_asked:
            return
        self._was_asked = True
        self._copies[step] = HostCopy(self._weights, self._shards)
        for version in self.versions[: -self._capacity]:
            del self._copies[version]

    def nearest(self, version: int) -> int:
        """The newest kept version that is not newer, else the oldest."""
        return max((kept for kept in self.versions if kept <= version), default=self.versions[0])

    def in_place(self, version: int) -> AbstractContextManager[None]:
        return self._copies[version].in_place()

    def chunks(self) -> Iterator[ShardChunk]:
        for version, copy in self._copies.items():
            yield from copy.state(f"{_PART}{version}").chunks()

    def restore(self, reader: CheckpointReader) -> None:
        """Keeps the versions that the checkpoint has, and no others."""
        versions = {int(found[1]) for name in reader.names if (found := re.match(rf"{_PART}(\d+)/", name))}
        self._copies = {version: HostCopy(self._weights, self._shards) for version in sorted(versions)}
        for version, copy in self._copies.items():
            copy.state(f"{_PART}{version}").restore(reader)


class OldLogProbs:
    """`policies` are kept only with keep_old_actor; `before` is given "" before the passes for the policy's own."""

    def __init__(
        self,
        config: TrainSection,
        layout: Layout,
        pipeline: Pipeline,
        policies: OldPolicies | None,
        before: Callable[[str], None] | None,
    ) -> None:
        self._layout = layout
        self._pipeline = pipeline
        self._policies = policies
        self._before = before
        self._routing: Routing = "free"
        if config.use_routing_replay or config.use_rollout_routing_replay:
            self._routing = "replay" if config.use_rollout_routing_replay else "record"
        self._trains_on_them = trains_on_old_log_probs(config)

    def __call__(self, step: int, steps: Sequence[StepInputs], *, for_advantages: bool) -> Sequence[StepInputs]:
        """Collective: the steps with own log-probs for their advantages, and old ones for their loss."""
        if self._policies is not None:
            self._policies.remember(step)
            versions = self._versions(self._policies, step, [micro for inputs in steps for micro in inputs])
            if versions != [step]:
                return self._by_version(self._policies, step, steps, versions)
        trains_on_them = self._trains_on_them and len(steps) > 1
        if for_advantages:
            return self._with_log_probs(steps, "own_log_probs", *(["old_log_probs"] if trains_on_them else []))
        return [*steps[:1], *self._with_log_probs(steps[1:], "old_log_probs")] if trains_on_them else steps

    def _with_log_probs(self, steps: Sequence[StepInputs], *names: str) -> list[StepInputs]:
        if self._before is not None:
            self._before("")
        found = [(inputs, self._pipeline.log_probs(inputs, routing=self._routing)) for inputs in steps]
        for name in names:
            found = [(filled(inputs, name, log_probs), log_probs) for inputs, log_probs in found]
        return [inputs for inputs, _ in found]

    def _versions(self, policies: OldPolicies, step: int, micros: Iterable[MicroInputs]) -> list[int]:
        """The versions that samples of any rank are from: all ranks swap alike, for passes are collective."""
        kept = policies.versions
        mine = {version for micro in micros for version in _of(policies, step, micro)[: len(micro.samples)]}
        found = torch.tensor([version in mine for version in kept], dtype=torch.int64, device=self._layout.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [version for version, is_there in zip(kept, found.tolist(), strict=True) if is_there]

    def _by_version(
        self, policies: OldPolicies, step: int, steps: Sequence[StepInputs], versions: Sequence[int]
    ) -> Sequence[StepInputs]:
        found = [[torch.zeros_like(micro.mask) for micro in inputs] for inputs in steps]
        for version in versions:
            with policies.in_place(version):
                if self._before is not None:
                    self._before("")
                for inputs, olds in zip(steps, found, strict=True):
                    log_probs_of = self._pipeline.log_probs(inputs, routing=self._routing) or []
                    for number, log_probs in enumerate(log_probs_of):
                        is_from = torch.tensor([each == version for each in _of(policies, step, inputs[number])])
                        olds[number] = torch.where(is_from[:, None].to(log_probs.device), log_probs, olds[number])
        if not self._layout.is_last_stage:
            return steps
        for name in ("own_log_probs", "old_log_probs"):
            steps = [filled(inputs, name, olds) for inputs, olds in zip(steps, found, strict=True)]
        return steps


def _of(policies: OldPolicies, step: int, micro: MicroInputs) -> list[int]:
    return [policies.nearest(step - int(one)) for one in micro.staleness[:, 0].tolist()]
