"""Which jobs may replay routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.job.rules.training import check_routing_replay
from headrace.job.schema.job import Job
from headrace.models.architecture import Architecture
from headrace.models.registry import read_architecture
from tests.support.models.tiny_families import make_tiny

RECORDED = {"use_routing_replay": True, "num_steps_per_rollout": 2}
ROLLOUTS = {"use_rollout_routing_replay": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def experts(folder: Path) -> Architecture:
    return read_architecture(folder)


@pytest.mark.parametrize(
    ("train", "megatron", "message"),
    [
        (RECORDED | {"keep_old_actor": True}, {}, r"several policies: pass --use-rollout-routing-replay"),
        (
            RECORDED | {"num_steps_per_rollout": 1},
            {},
            r"use_routing_replay has no effect: this job computes no old log-probs",
        ),
        (RECORDED | {"loss_type": "sft_loss"}, {}, r"use_routing_replay has no effect"),
        (RECORDED, {"moe_router_fusion": True}, r"use_routing_replay with moe_router_fusion"),
        (ROLLOUTS, {"moe_router_load_balancing_type": "sinkhorn"}, r"sinkhorn: sinkhorn chooses other experts"),
    ],
)
def test_these_may_not(
    folder: Path, experts: Architecture, train: dict[str, Any], megatron: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_routing_replay(_job(folder, train, megatron), experts)


def _job(folder: Path, train: dict[str, Any], megatron: dict[str, Any]) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": folder}, "train": train, "megatron": megatron})
