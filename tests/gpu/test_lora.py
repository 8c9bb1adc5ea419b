"""A step of LoRA on a device: `make gpu PART=lora`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.devices import Figure, Trained
from tests.support.ranks.device_case import run

pytestmark = pytest.mark.timeout(900)


def test_a_step_of_lora_trains_with_the_memory_of_the_weights(trained: Trained, tmp_path: Path, figure: Figure) -> None:
    case = trained.size.case(trained.checkpoint, lora={"lora_rank": 16}, bf16=True)
    result = run(case, tmp_path, device=trained.device, timeout_seconds=600)
    assert result["log_probs"] == trained.result["log_probs"]  # B begins at 0
    for metrics in result["metrics"]:
        assert metrics["updated"] == 1.0
        assert 0.0 < metrics["grad_norm"] < float("inf")
    if trained.device == "cpu":
        return
    (speed, held), (full, whole) = map(speed_and_memory, (result, trained.result))
    weights = trained.result["parameters"] * 2
    assert result["allocated_bytes"] < 1.2 * weights + 2**30
    figure("a step of LoRA, rank 16", f"{speed:.0f} tokens/s; {held}", f"{full:.0f} tokens/s; {whole} of all weights")


def speed_and_memory(result: Mapping[str, Any]) -> tuple[float, str]:
    memory = f"{result['allocated_bytes'] / 1e9:.1f} GB, at most {result['peak_bytes'] / 1e9:.1f} GB"
    return result["metrics"][-1]["tokens_per_second"], memory
