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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from services.trainer.rl.hooks import BeforeLogProb
from services.trainer.rl.inputs import MicroInputs, MicroValues, StepInputs


class HostCopy:
    """A copy of everything in `weights` at the moment it is made, or taken again."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._values = {name: _copied(weight) for name, weight in weights.items()}

    def take(self) -> None:
        """Copies the weights that are in place now."""
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

    def shards(self, shards: Sequence[ModelShard]) -> list[ModelShard]:
        """The model's places in a checkpoint, with this copy's values."""
        names = {id(weight): name for name, weight in self._weights.items()}
        return [replace(shard, parameter=self._values[names[id(shard.parameter)]]) for shard in shards]


def _copied(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", copy=True)


class ReferencePolicy:
    """A host copy of a Hugging Face folder's weights, or of the initial ones; with LoRA of the adapters alone."""

    def __init__(self, weights: PolicyWeights, folder: Path | None) -> None:
        if folder is None:
            self._shards = weights.changing_shards
            self._copy = HostCopy(weights.changing)
            return
        current = HostCopy(weights.named)
        weights.become(folder)
        self._shards = weights.shards
        self._copy = HostCopy(weights.named)
        current.put()

    def in_place(self) -> AbstractContextManager[None]:
        """The model is the reference policy inside the block, and itself again after it."""
        return self._copy.in_place()

    def update(self) -> None:
        """Makes the current policy the reference from here on."""
        self._copy.take()

    def shards(self) -> list[ModelShard]:
        """Its weights in the model's places, for a checkpoint."""
        return self._copy.shards(self._shards)


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
        self._copies[step] = HostCopy(self._weights)
        for version in self.versions[: -self._capacity]:
            del self._copies[version]

    def nearest(self, version: int) -> int:
        """The newest kept version that is not newer, else the oldest."""
        return max((kept for kept in self.versions if kept <= version), default=self.versions[0])

    def in_place(self, version: int) -> AbstractContextManager[None]:
        """The model is that policy inside the block."""
        return self._copies[version].in_place()

    def chunks(self) -> Iterator[ShardChunk]:
        """The kept versions as chunks of a checkpoint."""
        for version, copy in self._copies.items():
            yield from self._state(version, copy).chunks()

    def scalars(self) -> Mapping[str, Any]:
        """There are none: versions are in the chunks' names."""
        return {}

    def restore(self, reader: CheckpointReader) -> None:
        """Keeps the versions that the checkpoint has, and no others."""
        versions = {int(found[1]) for name in reader.names if (found := re.match(rf"{_PART}(\d+)/", name))}
        self._copies = {version: HostCopy(self._weights) for version in sorted(versions)}
        for version, copy in self._copies.items():
            self._state(version, copy).restore(reader)

    def _state(self, version: int, copy: HostCopy) -> ModelState:
        return ModelState(f"{_PART}{version}", copy.shards(self._shards), None)


class OldLogProbs:
    """`policies` are kept only with keep_old_actor."""

    def __init__(
        self,
        config: TrainSection,
        layout: Layout,
        pipeline: Pipeline,
        policies: OldPolicies | None,
        before: BeforeLogProb | None,
    ) -> None:
        self._layout = layout
        self._pipeline = pipeline
        self._policies = policies
        self._before = before
        self._routing: Routing = "free"
        if config.use_routing_replay or config.use_rollout_routing_replay:
            self._routing = "replay" if config.use_rollout_routing_replay else "record"
        self._trains_on_them = trains_on_old_log_probs(config)

    def __call__(
        self, step: int, steps: Sequence[StepInputs], *, for_advantages: bool
    ) -> tuple[Sequence[MicroValues], Sequence[MicroValues]]:
        """Old log-probs for the advantages, and for the loss of every optimizer step. Collective over all ranks."""
        nothing: list[MicroValues] = [None] * len(steps)
        if self._policies is not None:
            self._policies.remember(step)
            versions = self._versions(self._policies, step, [micro for inputs in steps for micro in inputs])
            if versions != [step]:
                olds = self._by_version(self._policies, step, steps, versions)
                return olds, olds
        trains_on_them = self._trains_on_them and len(steps) > 1
        if for_advantages:
            own = self._all_log_probs(steps)
            return own, own if trains_on_them else nothing
        if trains_on_them:
            return nothing, [None, *self._all_log_probs(steps[1:])]
        return nothing, nothing

    def _all_log_probs(self, steps: Sequence[StepInputs]) -> list[MicroValues]:
        if self._before is not None:
            self._before("")
        return [self._log_probs(inputs) for inputs in steps]

    def _log_probs(self, inputs: StepInputs) -> list[Tensor] | None:
        return self._pipeline.log_probs(inputs, routing=self._routing)

    def _versions(self, policies: OldPolicies, step: int, micros: Iterable[MicroInputs]) -> list[int]:
        """The versions that samples of any rank are from: all ranks swap alike, for passes are collective."""
        kept = policies.versions
        mine = {version for micro in micros for version in _of(policies, step, micro)[: len(micro.samples)]}
        found = torch.tensor([version in mine for version in kept], dtype=torch.int64, device=self._layout.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [version for version, is_there in zip(kept, found.tolist(), strict=True) if is_there]

    def _by_version(
        self, policies: OldPolicies, step: int, steps: Sequence[StepInputs], versions: Sequence[int]
    ) -> list[MicroValues]:
        found = [[torch.zeros_like(micro.mask) for micro in inputs] for inputs in steps]
        for version in versions:
            with policies.in_place(version):
                if self._before is not None:
                    self._before("")
                for inputs, olds in zip(steps, found, strict=True):
                    for number, log_probs in enumerate(self._log_probs(inputs) or []):
                        is_from = torch.tensor([each == version for each in _of(policies, step, inputs[number])])
                        olds[number] = torch.where(is_from[:, None].to(log_probs.device), log_probs, olds[number])
        return list(found) if self._layout.is_last_stage else [None] * len(steps)


def _of(policies: OldPolicies, step: int, micro: MicroInputs) -> list[int]:
    """The kept version that each sample is from."""
    return [policies.nearest(step - int(one)) for one in micro.staleness[:, 0].tolist()]
