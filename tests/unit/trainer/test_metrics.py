"""Speed by formula against PyTorch's own counter, and the distance between trainer and engines against sums by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.job.schema.run import TrackingSection
from headrace.models.registry import read_architecture
from headrace.trajectory import Sample, Status
from services.rollout.engine.replies import NO_COUNTS, EngineCounts
from services.trainer.metrics import (
    LARGEST_STALENESS,
    LogProbDistance,
    Speed,
    accepted_drafts,
    peak_of,
    peak_tflops,
)
from services.trainer.plan.batch import Batch, SampleFacts, statistics
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
    assert metrics["tokens_per_second_per_rank"] == pytest.approx(8 / 5 / 2)
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


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_means_and_maxima_are_those_of_each_lags_trained_tokens() -> None:
    distance = LogProbDistance(torch.device("cpu"))
    before = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0], [-3.0, -3.0, -3.0]])
    rollout = torch.tensor([[-1.5, -2.0, -1.0], [-1.0, -2.0, -1.0], [-3.0, -3.0, -4.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    distance.add(before, rollout, mask, torch.tensor([[0.0], [2.0], [2.0]]))
    distance.add(before[:1], rollout[:1], mask[:1], torch.tensor([[LARGEST_STALENESS + 5.0]]))
    assert distance.read() == pytest.approx(
        {
            "log_prob_diff/lag_0/mean": 0.25,
            "log_prob_diff/lag_0/max": 0.5,
            "log_prob_diff/lag_2/mean": 2 / 6,
            "log_prob_diff/lag_2/max": 1.0,
            f"log_prob_diff/lag_{LARGEST_STALENESS}/mean": 0.25,
            f"log_prob_diff/lag_{LARGEST_STALENESS}/max": 0.5,
        }
    )
    assert distance.read() == {}


def counted(counts: EngineCounts) -> Sample:
    """As it comes from the ledger."""
    sample = Sample(
        *("s", "g", 0, "prompt", "response"),
        tokens=np.asarray([1, 2], dtype=np.int32),
        loss_mask=np.ones(1, dtype=np.uint8),
        rollout_log_probs=np.asarray([-0.5], dtype=np.float32),
        status=Status.COMPLETED,
        hook_fields=counts.hook_fields(),
    )
    return Sample.unpack(sample.pack())


@pytest.mark.usefixtures("alone")
def test_the_acceptance_of_drafts_is_that_of_all_verifications_of_a_step() -> None:
    drafted = EngineCounts(prompt_tokens=9, completion_tokens=12, correct_drafts=6, proposed_drafts=20, verifications=5)
    longer = EngineCounts(
        prompt_tokens=9, completion_tokens=38, correct_drafts=24, proposed_drafts=60, verifications=15
    )
    undrafted = EngineCounts(prompt_tokens=9, completion_tokens=40)
    found = accepted_drafts([counted(c) for c in (drafted, longer, undrafted)], torch.device("cpu"))
    assert found == {"spec_accept_length": 50 / 20, "spec_accept_rate": 30 / 80}
    assert accepted_drafts([counted(undrafted), counted(NO_COUNTS)], torch.device("cpu")) == {}
    assert accepted_drafts([], torch.device("cpu")) == {}


def test_the_staleness_histogram_is_the_share_of_samples_at_each_lag() -> None:
    envelopes = [envelope(version) for version in (5, 5, 4, 2)]
    reply = buffer_pb2.LeaseBatchResponse(groups=[buffer_pb2.BatchGroup(samples=envelopes)], digest=b"d", ready=True)
    found = statistics(Batch.of(reply), step=5)
    histogram = {name: share for name, share in found.items() if name.startswith("staleness/lag_")}
    assert histogram == {"staleness/lag_0": 0.5, "staleness/lag_1": 0.25, "staleness/lag_3": 0.25}
    assert found["staleness/mean"] == 1.0
    assert found["staleness/max"] == 3.0


def envelope(policy_version: int) -> sample_pb2.SampleEnvelope:
    return sample_pb2.SampleEnvelope(
        sample_id=f"s{policy_version}",
        group_id="g",
        status=sample_pb2.SAMPLE_STATUS_COMPLETED,
        prompt_tokens=3,
        response_tokens=2,
        trained_tokens=2,
        policy_ranges=[sample_pb2.PolicyRange(policy_version=policy_version, start=0, end=2)],
    )
