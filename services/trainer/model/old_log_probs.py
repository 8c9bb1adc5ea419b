"""The old policy's log-probs: whose they are, and when they need not be computed.

The old policy is the one before this rollout step's first optimizer step or, with keep_old_actor, for each sample the
one that its oldest token came from. Before the first optimizer step the current policy is the old one, so what its
training pass finds is what a pass of its own would: that pass is skipped, unless advantages ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.job.schema.parts.old_log_probs import trains_on_old_log_probs
from headrace.job.schema.training import TrainSection
from services.trainer.megatron.gpt.routing_replay import Routing
from services.trainer.megatron.parallel import Layout
from services.trainer.model.old_policies import OldPolicies
from services.trainer.model.pipeline import Pipeline
from services.trainer.rl.hooks import BeforeLogProb
from services.trainer.rl.inputs import MicroInputs, StepInputs
from services.trainer.rl.micro_values import MicroValues


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
