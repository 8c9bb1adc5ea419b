"""What a spawned rank does in the tests of models with a vision tower: trains one rollout step on samples with images.

log_probs.json, log_probs_after.json  of every sample, before and after training
metrics.json                          of the step
initial, trained                      exported models
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headrace.images import IMAGE_GRIDS, PIXEL_VALUES
from headrace.trajectory import PolicyRange, Sample, Status
from tests.support.ranks.rank_cases import train_once
from tests.support.ranks.ranks import RankCase, Sections

TEXT_TOKENS = 300
"""Ids below are text."""
PATCH_VALUES = 1176
"""Qwen2.5-VL's"""
VISION_START, VISION_END, IMAGE = 300, 301, 302
_GROUPS = (([(4, 6)], 3), ([(4, 4), (8, 4)], 2), ([], 2))
"""The images of a group's prompt, in patches, and how many samples it has."""


@dataclass(frozen=True)
class VisionCase(RankCase):
    """GRPO in one optimizer step; the engine's log-probs are the old policy's."""

    plain: ClassVar[Sections] = {
        "rollout": {"num_rollout": 4},
        "train": {"micro_batch_size": 4, "num_steps_per_rollout": 1, "use_rollout_logprobs": True},
        "megatron": {"lr": 1e-2, "adam_eps": 1e-3},
    }

    patch_values: int = PATCH_VALUES

    def run(self) -> None:
        import torch.distributed as dist

        batch = samples(self.patch_values)
        policy, layout = self.policy()
        policy.export(self.out / "initial")
        self._write_log_probs(policy, layout, "log_probs.json")
        found = train_once(policy, 0, batch)
        policy.export(self.out / "trained")
        self._write_log_probs(policy, layout, "log_probs_after.json")
        if layout.rank == 0:
            (self.out / "metrics.json").write_text(json.dumps([found]))
        dist.barrier()

    def _write_log_probs(self, policy: Any, layout: Any, name: str) -> None:
        found = policy.log_probs(samples(self.patch_values))
        if layout.is_last_stage and layout.is_reporting_rank:
            (self.out / name).write_text(json.dumps([row.tolist() for row in found]))


def samples(patch_values: int = PATCH_VALUES) -> list[Sample]:
    """Groups of one image, of two, and of text alone."""
    random = np.random.default_rng(11)
    found = []
    for group, (grids, size) in enumerate(_GROUPS):
        prompt = [*random.integers(3, TEXT_TOKENS, 3).tolist()]
        for height, width in grids:
            prompt += [VISION_START, *[IMAGE] * (height * width // 4), VISION_END]
            prompt += random.integers(3, TEXT_TOKENS, 2).tolist()
        columns = {}
        if grids:
            num_patches = sum(height * width for height, width in grids)
            columns[PIXEL_VALUES] = random.normal(size=(num_patches, patch_values)).astype(np.float32)
            columns[IMAGE_GRIDS] = np.array([[1, *grid] for grid in grids])
        for index in range(size):
            response = random.integers(3, TEXT_TOKENS, int(random.integers(2, 9)))
            found.append(
                Sample(
                    sample_id=f"g{group}-{index}",
                    group_id=f"g{group}",
                    index=index,
                    prompt="",
                    response="",
                    tokens=np.array([*prompt, *response.tolist()], np.int32),
                    loss_mask=np.array([index != 1, *[1] * (len(response) - 1)], np.uint8),
                    rollout_log_probs=random.uniform(-6.5, -5.0, len(response)).astype(np.float32),
                    status=Status.COMPLETED,
                    reward=float(random.normal()),
                    policy_ranges=(PolicyRange(0, 0, len(response)),),
                    columns=columns,
                )
            )
    return found
