"""LoRA in real ranks in float64: log-probs, gradients and merged weights of every kind of linear layer are peft's.

`HEADRACE_WHOLE_RUNS=all` adds families and layouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.job.schema.training import LoraSection
from tests.long_forms import ALL
from tests.support.models.adapters import Merged, make_adapters, view_of
from tests.support.models.float64_reference import log_probs_of
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.lora_cases import LoraCase, gradients, merged
from tests.support.ranks.rank_cases import samples
from tests.support.ranks.rank_results import network
from tests.support.ranks.ranks import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

LORA = LoraSection(lora_rank=4, lora_alpha=6.0)
SCALE = 1.5
TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3_moe@alone": (1, {}),
    "qwen3_moe@ep2": (2, EP2),
    "qwen3_moe@sp2": (2, SP2),
    "deepseek_v3@alone": (1, {}),
}
if ALL:
    RUNS |= {
        "qwen3@alone": (1, {}),
        "qwen3@tp2": (2, TP2),
        "qwen3@sp2": (2, SP2),
        "glm4@tp2": (2, TP2),
        "qwen3_moe@pp2": (2, PP2),
        "qwen3_moe@sp2-etp1": (2, SP2 | {"expert_tensor_parallel_size": 1}),
        "qwen3_moe@ep2-sp2": (4, EP2 | SP2 | {"expert_tensor_parallel_size": 1}),
        "qwen3_moe@ep2-dp2": (4, EP2 | SHARDED),
        "qwen2_moe@sp2": (2, SP2),
        "glm4_moe@ep2": (2, EP2),
        "deepseek_v3@pp2": (2, PP2),
        "deepseek_v3@ep2": (2, EP2),
        "glm4_moe_lite@alone": (1, {}),
        "moonlight@ep2": (2, EP2),
        "kimi_k2@alone": (1, {}),
    }
FAMILIES = sorted({run.split("@")[0] for run in RUNS})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora-exact")
    for family in FAMILIES:
        make_adapters(make_tiny(folder / family, family), folder / f"{family}-adapters", LORA)
    cases = []
    for run, (ranks, megatron) in RUNS.items():
        family = run.split("@")[0]
        section = {"lora_rank": 4, "lora_alpha": 6.0, "lora_load": str(folder / f"{family}-adapters")}
        sections = {"lora": section, "megatron": megatron}
        cases.append(LoraCase(run, str(folder), str(folder / family), sections, ranks))
    run_cases(folder, max(ranks for ranks, _ in RUNS.values()), cases)
    return folder


def _summed(runs: Path, family: str) -> Merged:
    return Merged.of(network(runs / family), runs / family, runs / f"{family}-adapters", LORA, SCALE)


@pytest.mark.parametrize("run", RUNS)
def test_log_probs_and_gradients_are_those_of_the_sum_of_weights_and_adapters(runs: Path, run: str) -> None:
    summed = _summed(runs, run.split("@")[0])
    losses = []
    for row, sample in zip(json.loads((runs / run / "log_probs.json").read_text()), samples(0), strict=True):
        expected = log_probs_of(summed.network, sample)
        assert torch.allclose(torch.tensor(row, dtype=torch.float64), expected.detach(), rtol=0, atol=5e-6)
        if sample.failure is None:
            mask = torch.from_numpy(sample.loss_mask).double()
            losses.append(-(expected * mask).sum() / mask.sum().clamp(min=1))
    torch.stack(losses).mean().backward()
    found, wanted = gradients(runs / run), summed.gradients()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("run", RUNS)
def test_weights_leave_with_the_adapters_added(runs: Path, run: str) -> None:
    summed = _summed(runs, run.split("@")[0]).network
    tensors = dict(summed.named_parameters()) | dict(summed.named_buffers())
    for name, weight in merged(runs / run).items():
        assert torch.allclose(weight.double(), view_of(tensors, name).double(), rtol=0, atol=1e-6), name
