"""What a spawned rank does in the tests of models with a vision tower: trains one rollout step on samples with images.

log_probs.json   of every sample, before training
metrics.json     of the step
initial, trained exported models
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.images import IMAGE_GRIDS, PIXEL_VALUES
from headrace.job.schema.job import Job
from headrace.trajectory import PolicyRange, Sample, Status
from tests.support.ranks.ranks import entries

TEXT_TOKENS = 300
"""Ids below are text."""
VISION_START, VISION_END, IMAGE = 300, 301, 302
_GROUPS = (([(4, 6)], 3), ([(4, 4), (8, 4)], 2), ([], 2))
"""The images of a group's prompt, in patches, and how many samples it has."""


@dataclass(frozen=True)
class VisionCase:
    """One layout of one model."""

    name: str
    folder: str
    hf_checkpoint: str
    ranks: int
    """Only the first of the ranks take part."""
    megatron: Mapping[str, Any]
    train: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """Where its results are."""
        return Path(self.folder) / self.name

    def job(self) -> Job:
        """GRPO in one optimizer step; the engine's log-probs are the old policy's."""
        return Job.model_validate(
            {
                "model": {"hf_checkpoint": self.hf_checkpoint},
                "rollout": {"num_rollout": 4},
                "train": {"micro_batch_size": 4, "num_steps_per_rollout": 1, "use_rollout_logprobs": True}
                | dict(self.train),
                "megatron": {"lr": 1e-2, "adam_eps": 1e-3} | dict(self.megatron),
                **self.sections,
            }
        )


def samples() -> list[Sample]:
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
            columns[PIXEL_VALUES] = random.normal(size=(num_patches, 1176)).astype(np.float32)
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


def run_case(case: VisionCase) -> None:
    """In every rank at once."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from services.trainer.model.build import join_ranks, policy_of
    from services.trainer.plan.batch import SampleFacts

    os.environ["WORLD_SIZE"] = str(case.ranks)
    if int(os.environ["RANK"]) >= case.ranks:
        return
    case.out.mkdir(parents=True, exist_ok=True)
    try:
        layout = join_ranks(case.job())
        policy = policy_of(case.job(), layout)
        policy.export(case.out / "initial")
        by_id = {sample.sample_id: sample for sample in samples()}
        log_probs = policy.log_probs(list(by_id.values()))
        if layout.is_last_stage and layout.is_reporting_rank:
            (case.out / "log_probs.json").write_text(json.dumps([row.tolist() for row in log_probs]))
        facts = [SampleFacts.of(sample.pack().envelope) for sample in by_id.values()]
        found = policy.train(0, facts, lambda ids: [by_id[i] for i in ids])
        policy.export(case.out / "trained")
        after = policy.log_probs(list(by_id.values()))
        if layout.is_last_stage and layout.is_reporting_rank:
            (case.out / "log_probs_after.json").write_text(json.dumps([row.tolist() for row in after]))
        if layout.rank == 0:
            (case.out / "metrics.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def main(script: Path) -> None:
    """The cases of a script, one after the other."""
    for entry in entries(script):
        run_case(VisionCase(**entry))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
