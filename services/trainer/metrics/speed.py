"""The speed of a rollout step: tokens and operations a second, and their share of the device's peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from headrace.job.schema.run import TrackingSection
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.flops import ModelFlops

_PEAK_TFLOPS: Mapping[str, float] = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "A40": 149.7,
    "A10": 125.0,
    "RTX 4090": 165.2,
}
"""Dense bfloat16, from NVIDIA's data sheets; the first name that is part of the device's counts."""


def peak_tflops(tracking: TrackingSection, device: torch.device) -> float | None:
    """The job's figure, else the GPU's; None for a CPU or a GPU that is not in the table."""
    if tracking.peak_tflops is not None or device.type != "cuda":
        return tracking.peak_tflops
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> float | None:
    """The peak of the GPU that the driver calls by this name; None for one that is not in the table."""
    return next((peak for name, peak in _PEAK_TFLOPS.items() if name in device_name), None)


class Speed:
    """Operations are the model's own: each sample counts as a sequence of its own, trained once."""

    def __init__(self, flops: ModelFlops, world_size: int, peak: float | None) -> None:
        self._flops = flops
        self._world_size = world_size
        self._peak = peak

    def metrics(self, samples: Sequence[SampleFacts], seconds: Mapping[str, float]) -> dict[str, float]:
        """Metrics from this rank's seconds by part: fetch, log_probs, forward, forward_backward, optimizer, critic."""
        seconds = defaultdict(float, seconds)
        steps = seconds["forward_backward"] + seconds["optimizer"]
        lengths = [(s.prompt_length + s.response_length, s.response_length) for s in samples]
        tflops = self._flops.training(lengths) / max(steps, 1e-9) / self._world_size / 1e12
        found = {
            "tokens_per_second": sum(tokens for tokens, _ in lengths) / max(seconds["log_probs"] + steps, 1e-9),
            "tflops_per_rank": tflops,
            "time/fetch_seconds": seconds["fetch"],
            "time/log_probs_seconds": seconds["log_probs"],
            "time/forward_seconds": seconds["forward"],
            "time/backward_seconds": seconds["forward_backward"] - seconds["forward"],
            "time/optimizer_seconds": seconds["optimizer"],
        }
        if "critic" in seconds:
            found["time/critic_seconds"] = seconds["critic"]
        return found if self._peak is None else found | {"mfu": tflops / self._peak}
