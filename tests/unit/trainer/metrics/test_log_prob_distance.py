"""The distance between trainer and engines by lag, against sums made by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from services.trainer.metrics import LARGEST_STALENESS, LogProbDistance
from services.trainer.plan.batch import Batch, statistics


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
