"""Every family in real ranks over gloo: equal to transformers, through every layout and back, trained alike, resumed.

A dense one, one with experts and one with latent attention; `HEADRACE_WHOLE_RUNS=all` adds the others, and layouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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

FAMILIES: tuple[str, ...] = ("qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "olmo3", "gemma3_text")
FAMILIES += ("nemotron_h_moe",)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"tied": True},
    "qwen3_moe": {"num_layers": 4},  # enough for two virtual stages in each of two pipeline ranks
    "glm4": {"num_layers": 4},
    "gemma3_text": {"tied": True},
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
    "qwen3@tp2-pp2": (4, TP2 | PP2),
    "qwen3@sp2": (2, SP2),
    "qwen3_moe@ep2-distributed-optimizer": (2, EP2 | SHARDED),
    "qwen3_next@sp2": (2, SP2),
    "deepseek_v3@pp2": (2, PP2),
    "gpt_oss@ep2-sp2": (2, EP2 | SP2 | {"expert_tensor_parallel_size": 1}),
    "olmo3@sp2": (2, SP2),
    "nemotron_h_moe@sp2": (2, SP2),
    "gemma3_text@sp2": (2, SP2),
}
if ALL:
    FAMILIES += ("llama", "llama3_2", "qwen2", "mistral", "smollm3", "glm4", "glm4_32b")
    FAMILIES += (
        "qwen2_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "moonlight",
        "kimi_k2",
        "minimax_m2",
        "nemotron_h",
        "gemma3",
    )
    RUNS |= {
        "llama@tp2": (2, TP2),
        "qwen2_moe@sp2": (2, SP2),
        "smollm3@pp2": (2, PP2),
        "qwen3_moe@sp2": (2, SP2),
        "qwen3_moe@vpp2": (2, VPP2),
        "qwen3_next@pp2": (2, PP2),
        "qwen3_next@ep2": (2, EP2 | SHARDED),
        "qwen3_5@tp2": (2, TP2),
        "qwen3_5_moe@ep2": (2, EP2),
        "glm4@tp2": (2, TP2),
        "moonlight@ep2": (2, EP2),
        "qwen2_moe@ep2": (2, EP2),
        "glm4_moe_lite@ep2": (2, EP2),
        "qwen3_moe@ep2-vpp2": (4, EP2 | VPP2 | SHARDED),
        "glm4@sp2-vpp2": (4, SP2 | VPP2),
        "glm4@tp2-vpp2": (4, TP2 | PP2 | {"num_layers_per_virtual_pipeline_stage": 1}),
        "glm4_32b@tp2": (2, TP2),
        "glm4_moe_lite@pp2": (2, PP2),
        "deepseek_v3@ep2": (2, EP2),
        "qwen3_moe@ep2-sp2": (4, EP2 | SP2 | {"expert_tensor_parallel_size": 1}),
        "gpt_oss@pp2": (2, PP2),
        "gpt_oss@ep2": (2, EP2 | SHARDED),
        "olmo3@tp2": (2, TP2),
        "olmo3@pp2": (2, PP2),
        "gemma3@tp2": (2, TP2),
        "gemma3_text@tp2": (2, TP2),
        "gemma3_text@pp2": (2, PP2),
        "gemma3_text@tp2-dp2": (4, TP2 | SHARDED),
        "minimax_m2@sp2": (2, SP2),
        "minimax_m2@pp2": (2, PP2),
        "minimax_m2@ep2": (2, EP2 | SHARDED),
        "minimax_m2@ep2-sp2": (4, EP2 | SP2 | {"expert_tensor_parallel_size": 1}),
        "nemotron_h@tp2": (2, TP2),
        "nemotron_h@sp2": (2, SP2),
        "nemotron_h@pp2": (2, PP2),
        "nemotron_h@vpp2": (2, VPP2),
        "nemotron_h_moe@pp2": (2, PP2),
        "nemotron_h_moe@ep2": (2, EP2 | SHARDED),
        "nemotron_h_moe@ep2-sp2": (4, EP2 | SP2 | {"expert_tensor_parallel_size": 1}),
        "olmo3@tp2-dp2": (4, TP2 | SHARDED),
        "glm4_moe@ep2-dp2": (4, EP2 | SHARDED),
        "glm4_moe@pp2": (2, PP2 | {"num_layers_in_first_pipeline_stage": 1}),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all cases' results, and of the checkpoints they started from."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_tiny(folder / family, family, **SHAPES.get(family, {}))
    if ALL:
        add_mtp_layer(folder / "glm4_moe", "model.layers.3")
    add_mtp_layer(folder / "qwen3_next", "mtp.layers.0")
    make_fp8(folder / "qwen3", folder / "fp8")
    balancing = {"moe_router_bias_update_rate": 0.01, "moe_aux_loss_coeff": 0.0}
    alone: dict[str, tuple[int, dict[str, Any]]] = {f"{family}@alone": (1, {}) for family in (*FAMILIES, "fp8")}
    alone["deepseek_v3@balancing"] = (1, balancing)
    cases = [
        Case(name, str(folder), str(folder / name.split("@")[0]), {"megatron": megatron}, ranks)
        for name, (ranks, megatron) in (alone | RUNS).items()
    ]
    run_cases(folder, 4, cases)
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


def test_an_exported_model_loads_in_transformers_with_equal_logits(runs: Path) -> None:
    tokens, exported = torch.tensor([[5, 17, 256, 40, 8, 99]]), runs / "qwen3@tp2-pp2" / "initial"
    with torch.no_grad():
        found, expected = (AutoModelForCausalLM.from_pretrained(f)(tokens).logits for f in (exported, runs / "qwen3"))
    assert torch.equal(found, expected)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.decode(tokenizer.encode("1 + 2")) == "1 + 2"


def test_an_fp8_checkpoint_is_multiplied_out_as_it_is_loaded(runs: Path) -> None:
    assert_round_trip(runs / "fp8@alone", runs / "fp8-exact")
    assert_log_probs_of_transformers(runs / "fp8@alone", runs / "fp8-exact")
    assert "quantization_config" not in json.loads((runs / "fp8@alone" / "initial" / "config.json").read_text())


def test_router_biases_move_towards_experts_that_have_less_to_do_where_the_job_says_so(runs: Path) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    before, after = weights(runs / "deepseek_v3")[bias], weights(runs / "deepseek_v3@balancing" / "trained")[bias]
    steps = ((after - before) / 0.01).round(decimals=3)
    assert set(steps.tolist()) <= {-2.0, -1.0, 0.0, 1.0, 2.0}  # two optimizer steps
    assert steps.any()
