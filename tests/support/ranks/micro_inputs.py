"""Micro-batches of made-up responses, for what is computed from log-probs without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.trajectory import Sample, Status
from services.trainer.rl.inputs import MicroInputs


def micro_inputs(
    mask: Tensor, *, lengths: Sequence[int] | None = None, **tensors: Tensor | tuple[float, ...]
) -> MicroInputs:
    """One response a row of `mask` [B, S]; every trained token has the same weight unless `weights` are given.

    What is not given is zeros; `lengths` are S unless given.
    """
    mask = mask.float()
    fields: dict[str, Any] = dict.fromkeys(("rows", "logit_positions", "target_slots", "targets", "experts"))
    zeros = {name: torch.zeros_like(mask) for name in ("rollout_log_probs", "advantages", "returns")}
    weights = {"weights": mask / mask.sum().clamp(min=1), "staleness": mask[:, :1], "rewards": (0.0,) * len(mask)}
    found: dict[str, Any] = fields | zeros | weights | tensors
    samples = [_sample(row, length) for row, length in enumerate(lengths or [mask.shape[1]] * len(mask))]
    return MicroInputs(**found, mask=mask, loss_scale=1.0, samples=samples)


def _sample(index: int, length: int) -> Sample:
    return Sample(
        sample_id=str(index),
        group_id="g",
        index=index,
        prompt="",
        response="",
        tokens=np.arange(length + 1, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        rollout_log_probs=np.zeros(length, np.float32),
        status=Status.COMPLETED,
    )
