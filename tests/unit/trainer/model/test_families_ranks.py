"""Families with experts, latent attention or norms behind the layers, in real ranks over gloo.

They equal transformers, go through every layout and back bit for bit, and are trained alike.
`HEADRACE_WHOLE_RUNS=all` adds families and layouts that have no code of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.long_forms import ALL
from tests.support.models.tiny_families import make_tiny
from tests.support.models.tiny_variants import add_mtp_layer, make_fp8
from tests.support.ranks.rank_cases import Case
from tests.support.ranks.rank_results import (
    assert_log_probs_of_transformers,
    assert_round_trip,
    assert_same_training,
    assert_trained_and_resumed,
    weights,
)
from tests.support.ranks.ranks import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

FAMILIES = (
    *("qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "moonlight", "kimi_k2"),
    *("llama3_2", "smollm3", "qwen2_moe", "glm4_moe_lite"),
    *(("mistral", "glm4_32b") if ALL else ()),
)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_layers": 4},  # enough for two virtual stages in each of two pipeline ranks
    "glm4": {"num_layers": 4},
    "llama3_2": {"tied": True},
    "smollm3": {"num_layers": 4},
    # The layer behind the last is in the checkpoint and not in the model.
    "glm4_moe": {"num_layers": 3, "num_nextn_predict_layers": 1},
}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3_moe@dp2": (2, {}),
    "qwen3_moe@ep2": (2, EP2),
    "glm4@sp2": (2, SP2),
    "qwen3_moe@vpp2": (2, VPP2),
    "glm4_moe@ep2": (2, EP2),
    "glm4_moe@pp2": (2, PP2 | {"num_layers_in_first_pipeline_stage": 1}),
    "deepseek_v3@ep2": (2, EP2),
    "deepseek_v3@pp2": (2, PP2),
    "qwen3_moe@ep2-vpp2": (4, EP2 | VPP2 | SHARDED),
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen2_moe@sp2": (2, SP2),
    "smollm3@pp2": (2, PP2),
    "qwen3_moe@sp2": (2, SP2),
    "qwen3_moe@ep2-distributed-optimizer": (2, EP2 | SHARDED),
    "glm4@tp2": (2, TP2),
    "moonlight@ep2": (2, EP2),
    "qwen3_moe@ep2-pp2": (4, EP2 | PP2),
    "glm4@sp2-vpp2": (4, SP2 | VPP2),
    "glm4@tp2-vpp2": (4, TP2 | PP2 | {"num_layers_per_virtual_pipeline_stage": 1}),
    "llama3_2@tp2": (2, TP2),
    "mistral@tp2": (2, TP2),
    "qwen2_moe@ep2": (2, EP2),
    "glm4_32b@tp2": (2, TP2),
    "glm4_moe_lite@ep2": (2, EP2),
    "glm4_moe_lite@pp2": (2, PP2),
    "qwen3_moe@ep2-sp2": (4, EP2 | SP2 | {"expert_tensor_parallel_size": 1}),
    "qwen3_moe@ep4": (4, {"expert_model_parallel_size": 4}),
    "glm4_moe@ep2-dp2": (4, EP2 | SHARDED),
    "glm4@tp2-pp2": (4, TP2 | PP2),
}
if ALL:
    RUNS |= MORE


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all cases' results, and of the checkpoints they started from."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_tiny(folder / family, family, **SHAPES.get(family, {}))
    add_mtp_layer(folder / "glm4_moe", 3)
    make_fp8(folder / "moonlight", folder / "fp8")
    alone = [_case(folder, f"{family}@alone", {}) for family in FAMILIES]
    balancing = {"moe_router_bias_update_rate": 0.01, "moe_aux_loss_coeff": 0.0}
    alone += [_case(folder, "fp8@alone", {}), _case(folder, "moonlight@balancing", balancing)]
    run_cases(folder, 1, alone)
    for world_size in (2, 4):
        cases = [_case(folder, run, megatron) for run, (ranks, megatron) in RUNS.items() if ranks == world_size]
        run_cases(folder, world_size, cases)
    return folder


@pytest.mark.parametrize("run", [*(f"{family}@alone" for family in FAMILIES), *RUNS])
def test_a_family_is_that_of_transformers_and_trains(runs: Path, run: str) -> None:
    model = runs / run.split("@")[0]
    assert_log_probs_of_transformers(runs / run, model)
    assert_round_trip(runs / run, model)
    assert_trained_and_resumed(runs / run)


@pytest.mark.parametrize("run", RUNS)
def test_training_does_not_depend_on_the_layout(runs: Path, run: str) -> None:
    assert_same_training(runs / run, runs / f"{run.split('@')[0]}@alone")


def test_an_fp8_checkpoint_is_multiplied_out_as_it_is_loaded(runs: Path) -> None:
    assert_round_trip(runs / "fp8@alone", runs / "fp8-exact")
    assert_log_probs_of_transformers(runs / "fp8@alone", runs / "fp8-exact")
    assert "quantization_config" not in json.loads((runs / "fp8@alone" / "initial" / "config.json").read_text())


def test_router_biases_move_towards_experts_that_have_less_to_do_where_the_job_says_so(runs: Path) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    before, after = weights(runs / "moonlight")[bias], weights(runs / "moonlight@balancing" / "trained")[bias]
    steps = ((after - before) / 0.01).round(decimals=3)
    assert set(steps.tolist()) <= {-2.0, -1.0, 0.0, 1.0, 2.0}  # two optimizer steps
    assert steps.any()


def test_the_router_learns(runs: Path) -> None:
    before, after = weights(runs / "qwen3_moe"), weights(runs / "qwen3_moe@ep2" / "trained")
    router = "model.layers.1.mlp.gate.weight"
    assert not torch.allclose(before[router], after[router], atol=1e-4)


def _case(folder: Path, name: str, megatron: dict[str, Any]) -> Case:
    return Case(name, str(folder), str(folder / name.split("@")[0]), megatron)
