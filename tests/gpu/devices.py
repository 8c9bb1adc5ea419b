"""What the parts of `make gpu` share: the devices, the models' sizes, and three steps of one on each device.

Every body runs tiny on a CPU in `make test`, and with a random model of 1.7e9 parameters where there is a GPU: torch,
megatron-core and transformers are all it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.device_case import DeviceCase

Figure = Callable[[str, str, str], None]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


@dataclass(frozen=True)
class Size:
    """What is big enough for a device to be worth measuring."""

    config: Mapping[str, Any]
    num_samples: int
    prompt_length: int
    response_length: int
    bf16_mean_difference: float
    float32_largest_difference: float
    peak_tflops: float | None

    def case(self, checkpoint: Path, lora: Mapping[str, Any] | None = None, **megatron: object) -> DeviceCase:
        return DeviceCase(
            hf_checkpoint=str(checkpoint),
            vocab_size=self.config["vocab_size"],
            megatron=megatron,
            lora=lora or {},
            num_samples=self.num_samples,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            num_compared=2,
            num_steps=3,
            peak_tflops=self.peak_tflops,
        )


TINY = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "initializer_range": 0.15,
}  # fmt: skip
QWEN3_1_7B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "initializer_range": 0.02,
}  # fmt: skip
SIZES = {
    "cpu": Size(TINY, 8, 10, 20, bf16_mean_difference=0.05, float32_largest_difference=1e-4, peak_tflops=1.0),
    "cuda": Size(
        QWEN3_1_7B, 32, 512, 1536, bf16_mean_difference=0.05, float32_largest_difference=5e-3, peak_tflops=None
    ),
}


@dataclass
class Trained:
    """A device, its model in bfloat16, and what became of three steps on it."""

    device: str
    size: Size
    checkpoint: Path
    result: dict[str, Any]
