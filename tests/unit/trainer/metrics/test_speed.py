"""Operations by formula against PyTorch's own counter; speed and distance from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headrace.api.sample.v1 import sample_pb2
from headrace.job.schema.run import TrackingSection
from headrace.models.registry import read_architecture
from services.trainer.metrics import Speed, peak_of, peak_tflops
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.planning import ModelFlops
from tests.support.models.tiny_families import VOCAB_SIZE, make_tiny
from tests.support.ranks.rank_results import network

LENGTH = 48
FAMILIES = ("qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_needs_what_pytorch_counts(family: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family, tied=True)
    model = network(folder)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(3, VOCAB_SIZE, (1, LENGTH)))
    # transformers computes every pair of positions, also those that the causal mask hides.
    formula = ModelFlops.of(read_architecture(folder)).forward(LENGTH, LENGTH * LENGTH, LENGTH)
    assert formula == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_speed_is_what_was_needed_over_the_time_that_trained() -> None:
    seconds = {"fetch": 5.0, "log_probs": 1.0, "forward": 1.0, "forward_backward": 3.0, "optimizer": 1.0}
    flops = ModelFlops(per_token=10**12, per_pair=0, per_projection=0)
    metrics = Speed(flops, world_size=2, peak=3.0).metrics([facts(6, 2)], seconds)
    assert metrics["tflops_per_rank"] == pytest.approx(3 * 8 / 4 / 2)
    assert metrics["mfu"] == pytest.approx(1.0)
    assert metrics["tokens_per_second"] == pytest.approx(8 / 5)
    assert metrics["time/backward_seconds"] == pytest.approx(2.0)
    assert "mfu" not in Speed(flops, world_size=2, peak=None).metrics([facts(6, 2)], seconds)


@pytest.mark.parametrize(
    ("device_name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("Somebody's accelerator", None),
    ],
)
def test_the_peak_of_known_gpus(device_name: str, peak: float | None) -> None:
    assert peak_of(device_name) == peak


def test_a_given_peak_counts_and_a_cpu_has_none_of_its_own() -> None:
    assert peak_tflops(TrackingSection(peak_tflops=0.2), torch.device("cpu")) == 0.2
    assert peak_tflops(TrackingSection(), torch.device("cpu")) is None


def facts(prompt: int, response: int) -> SampleFacts:
    status = sample_pb2.SAMPLE_STATUS_COMPLETED
    return SampleFacts.of(
        sample_pb2.SampleEnvelope(sample_id="s", status=status, prompt_tokens=prompt, response_tokens=response)
    )
