"""`python -m tests.support.ranks.device_case FOLDER`: one rank, on any device, does what FOLDER/case.json says.

It writes result.json: the device, the number of parameters, log-probs of the first samples before training, the metrics
of every step, and on a GPU the bytes that were allocated after the last step and at most.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.job.schema.job import Job
from headrace.trajectory import PolicyRange, Sample, Status
from tests.support.ranks.rank_cases import train_once

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class DeviceCase:
    """A model, a batch and how to train on it."""

    hf_checkpoint: str
    vocab_size: int
    megatron: Mapping[str, Any]
    lora: Mapping[str, Any]
    num_samples: int
    prompt_length: int
    response_length: int
    num_compared: int
    num_steps: int
    peak_tflops: float | None

    def job(self) -> Job:
        """In one optimizer step a rollout step, dynamic micro-batches of two samples."""
        tokens = 2 * (self.prompt_length + self.response_length)
        return Job.model_validate(
            {
                "model": {"hf_checkpoint": self.hf_checkpoint},
                "rollout": {"num_rollout": max(self.num_steps, 1)},
                "train": {"num_steps_per_rollout": 1, "use_dynamic_batch_size": True, "max_tokens_per_gpu": tokens},
                "megatron": {"lr": 1e-4, **self.megatron},
                "lora": self.lora,
                "tracking": {"peak_tflops": self.peak_tflops},
            }
        )

    def samples(self, step: int) -> list[Sample]:
        """Equal on every machine; in groups of four."""
        random = np.random.default_rng(step)
        return [self._sample(random, index) for index in range(self.num_samples)]

    def _sample(self, random: np.random.Generator, index: int) -> Sample:
        length, response = self.prompt_length + self.response_length, self.response_length
        return Sample(
            sample_id=f"s{index}",
            group_id=f"g{index // 4}",
            index=index % 4,
            prompt="",
            response="",
            tokens=random.integers(3, self.vocab_size, length).astype(np.int32),
            loss_mask=np.ones(response, np.uint8),
            rollout_log_probs=np.full(response, -np.log(self.vocab_size), np.float32),
            status=Status.COMPLETED,
            reward=float(random.normal()),
            policy_ranges=[PolicyRange(0, 0, response)],
        )


def run(case: DeviceCase, folder: Path, *, device: str, timeout_seconds: float) -> dict[str, Any]:
    """In a process of its own, which sees no GPU unless `device` is cuda."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.ranks.device_case", str(folder)],
        cwd=ROOT, env=os.environ | hidden,
        capture_output=True, text=True, timeout=timeout_seconds,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def main(folder: Path) -> None:
    import torch

    from services.trainer.model.build import join_ranks, policy_of

    case = DeviceCase(**json.loads((folder / "case.json").read_text()))
    job = case.job()
    layout = join_ranks(job)
    policy = policy_of(job, layout)
    result: dict[str, Any] = {
        "device": layout.device.type,
        "parameters": sum(math.prod(spec.shape) for spec in policy.hf_tensor_specs()),
        "log_probs": [row.tolist() for row in policy.log_probs(case.samples(0)[: case.num_compared])],
        "metrics": [train_once(policy, step, case.samples(step)) for step in range(case.num_steps)],
    }
    if layout.device.type == "cuda":
        torch.cuda.synchronize()
        result |= {
            "name": torch.cuda.get_device_name(),
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
    result["turn"] = _give_and_take(policy, case, layout.device.type)
    (folder / "result.json").write_text(json.dumps(result))


def _give_and_take(policy: Any, case: DeviceCase, device: str) -> dict[str, float]:
    """The device's memory before, while and after engines could have it, and what that changed in the log-probs."""
    import torch

    def allocated() -> int:
        return torch.cuda.memory_allocated() if device == "cuda" else 0

    some = case.samples(0)[: case.num_compared]
    before, had = torch.cat(policy.log_probs(some)).cpu(), allocated()
    started = time.perf_counter()
    policy.memory.to_host()  # a GPU's rank allocates the host's pages now and keeps them for the turns that follow
    allocated_pages = time.perf_counter()
    policy.memory.to_device()
    again = time.perf_counter()
    policy.memory.to_host()
    there, left = time.perf_counter(), allocated()
    policy.memory.to_device()
    back = time.perf_counter()
    after = torch.cat(policy.log_probs(some)).cpu()
    return {
        "had_bytes": had,
        "left_bytes": left,
        "has_bytes": allocated(),
        "first_to_host_seconds": allocated_pages - started,
        "to_host_seconds": there - again,
        "to_device_seconds": back - there,
        "largest_difference": float((after - before).abs().max()),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
