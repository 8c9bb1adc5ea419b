"""A model's inputs in one optimizer step: micro-batches on the rank's device, with rewards and loss weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.job.schema.training import TrainSection
from headrace.models.architecture import Vision
from headrace.trajectory import Sample
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.planning import MicroBatch, StepPlan, collate, empty_micro_batch
from services.trainer.plan.rows import ExpertChoices, Packing, RolloutChoices, RowImages, Rows, row_images
from services.trainer.rl.algorithms.numerics import Reduction
from services.trainer.rl.algorithms.vocab_parallel import KeptTokens
from services.trainer.rl.sampling_mask import engines_masks


@dataclass(frozen=True, slots=True, eq=False)
class MicroInputs:
    """Rows for the model, and B answers of at most S tokens: column t speaks of a response's token t.

    Rows, logit_positions and target_slots are this rank's part in its context group, the rest is all of it.
    """

    rows: Rows
    logit_positions: Tensor
    """int64 [N], positions of the flattened rows that predict a token"""
    target_slots: Tensor
    """int64 [N], where that token is in the flattened [B, S]"""
    targets: Tensor
    """int64 [B, S], the tokens to predict"""
    mask: Tensor
    """float32 [B, S], 1 where the target is trained"""
    weights: Tensor
    """float32 [B, S], the target's share of the global loss"""
    loss_scale: float
    """How many rollouts (or tokens, for a loss per token) of the step the weights are an average over"""
    rollout_log_probs: Tensor
    """float32 [B, S], the engine's log-probs of the targets"""
    staleness: Tensor
    """float32 [B, 1], how many steps behind the sample's oldest token is"""
    advantages: Tensor
    """float32 [B, S]; zeros until rl/advantages.py fills it in"""
    returns: Tensor
    """float32 [B, S]: what a critic learns; likewise"""
    rewards: Sequence[float]
    """The reward of each sample as the estimator wants it: raw, or against its group"""
    samples: Sequence[Sample]
    """The samples of the first rows; an empty micro-batch has a row and no sample"""
    experts: ExpertChoices
    """The experts to which routing replay sends the tokens; a pass may record them for later ones"""
    images: RowImages | None = None
    """The images of the rows; None: a model of text alone"""
    kept: KeptTokens | None = None
    """The tokens that the targets were sampled from, by their places in the flattened [B, S]; None: all, everywhere"""
    outside: Tensor | None = None
    """bool [B, S]: targets that the policy's own choice of them would not hold; None: engines chose"""
    mean_weight: float = 1.0
    """What importance weights are divided by: their mean over the optimizer step, where they are normalized"""
    own_log_probs: Tensor | None = None
    """float32 [B, S], the policy's that this rollout step starts from (keep_old_actor: that a sample is from). This and
    the next four are filled in by `Preparation`, where the job needs them, on the ranks of the last stage."""
    old_log_probs: Tensor | None = None
    """float32 [B, S], what the loss compares the policy with; None: what its own pass finds"""
    reference_log_probs: Tensor | None = None
    """float32 [B, S]"""
    teacher_log_probs: Tensor | None = None
    """float32 [B, S]"""
    values: Tensor | None = None
    """float32 [B, S], the critic's before this rollout step's updates"""

    def cut(self, values: Tensor) -> list[Tensor]:
        """Each sample's part of [B, S], [R] each: views, differentiable."""
        return [row[: sample.response_length] for row, sample in zip(values, self.samples, strict=False)]

    def copies(self, values: Tensor) -> list[Tensor]:
        """Copies of `cut`'s parts: a user's function may write into them without changing anything else."""
        return [part.clone() for part in self.cut(values)]

    def put(self, parts: Sequence[Tensor]) -> Tensor:
        """The other way: float32 [B, S], 0 where there is no token."""
        whole = torch.zeros_like(self.mask)
        for row, part in enumerate(parts):
            whole[row, : len(part)] = part
        return whole


StepInputs = Sequence[MicroInputs]


def filled(inputs: StepInputs, name: str, values: Sequence[Tensor] | None) -> StepInputs:
    """The micro-batches with these [B, S] as the field `name`; None (not on the last stage) leaves them as they are."""
    if values is None:
        return inputs
    changes: list[dict[str, Any]] = [{name: value} for value in values]
    return [replace(micro, **change) for micro, change in zip(inputs, changes, strict=True)]


def step_inputs(
    plan: StepPlan,
    step: int,
    samples: Sequence[SampleFacts],
    rewards: Mapping[str, float],
    fetched: Mapping[str, Sample],
    config: TrainSection,
    layout: Layout,
    packing: Packing,
    choices: RolloutChoices | None = None,
    vision: Vision | None = None,
) -> list[MicroInputs]:
    """This data rank's micro-batches of one optimizer step; every data rank has the same number of them.

    `rewards` come from the groups of the whole rollout batch, weights from the samples of this step, `choices` of
    experts from the samples, where they are replayed.
    """
    ids = plan.all_sample_ids
    of_step = [s for s in samples if s.sample_id in ids]
    reduction = Reduction.of(of_step, per_token=config.calculate_per_token_loss, constant=config.loss_constant_length)
    staleness = {s.sample_id: float(step - s.min_policy_version) for s in of_step if s.min_policy_version is not None}
    weights = {s.sample_id: reduction.weight(s.sample_id) for s in of_step}
    scale = reduction.num_tokens if config.calculate_per_token_loss else reduction.num_rollouts
    micro_batches = [
        collate([fetched[i] for i in ids], packing) if ids else empty_micro_batch()
        for ids in plan.micro_batches(layout.data_rank)
    ]
    inputs = [
        _on_device(
            micro,
            micro.loss_mask * _column(micro, weights),
            scale,
            _column(micro, staleness),
            rewards,
            layout,
            choices,
            vision,
        )
        for micro in micro_batches
    ]
    if not config.keep_sampling_mask:
        return inputs
    return [
        replace(micro, kept=engines_masks(micro.samples, micro.targets.shape[1], layout.device)) for micro in inputs
    ]


def inference_inputs(micro: MicroBatch, layout: Layout, vision: Vision | None = None) -> MicroInputs:
    """Inputs for log-probs alone: no rewards, no weights."""
    staleness = torch.zeros(len(micro.targets), 1)
    return _on_device(micro, torch.zeros(micro.targets.shape), 1, staleness, {}, layout, vision=vision)


def _on_device(
    micro: MicroBatch,
    weights: Tensor,
    scale: int,
    staleness: Tensor,
    rewards: Mapping[str, float],
    layout: Layout,
    choices: RolloutChoices | None = None,
    vision: Vision | None = None,
) -> MicroInputs:
    device = layout.device
    zeros = torch.zeros(micro.targets.shape, dtype=torch.float32, device=device)
    rows, logit_positions, target_slots = layout.context.part(
        micro.rows.to(device), micro.logit_positions.to(device), micro.target_slots.to(device)
    )
    return MicroInputs(
        rows=rows,
        logit_positions=logit_positions,
        target_slots=target_slots,
        targets=micro.targets.to(device),
        mask=micro.loss_mask.to(device, torch.float32),
        weights=weights.to(device),
        loss_scale=float(max(scale, 1)),
        rollout_log_probs=micro.rollout_log_probs.to(device),
        staleness=staleness.to(device),
        advantages=zeros,
        returns=zeros,
        rewards=tuple(rewards.get(sample.sample_id, 0.0) for sample in micro.samples),
        samples=micro.samples,
        experts=choices.of(micro.samples, micro.sample_numbers, rows) if choices else ExpertChoices(),
        images=row_images(micro.samples, micro.sample_numbers, rows, vision) if vision else None,
    )


def _column(micro: MicroBatch, values: Mapping[str, float]) -> Tensor:
    """float32 [B, 1]; 0 for the dummy of an empty micro-batch."""
    found = [[values.get(sample.sample_id, 0.0)] for sample in micro.samples]
    return torch.tensor(found or [[0.0]], dtype=torch.float32)
