"""LoRA in real ranks in float64: log-probs, gradients and merged weights of every kind of linear layer are peft's.

`HEADRACE_WHOLE_RUNS=all` adds families and layouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.job.schema.training import LoraSection
from tests.long_forms import ALL
from tests.support.models.adapters import Merged, make_adapters, view_of
from tests.support.models.float64_reference import log_probs_of
from tests.support.models.tiny_families import make_tiny
from tests.support.models.tiny_vision import PATCH_VALUES as VISION
from tests.support.models.tiny_vision import make_tiny_vision, vision_network
from tests.support.ranks import vision_cases
from tests.support.ranks.lora_cases import LoraCase, gradients, merged
from tests.support.ranks.rank_cases import Case, samples
from tests.support.ranks.rank_results import assert_same_training, network, weights
from tests.support.ranks.ranks import run_cases
from tests.support.ranks.stand_in_program import run_on_stand_ins

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

LORA = {"lora_rank": 4, "lora_alpha": 6.0}
RSLORA = LORA | {"lora_use_rslora": True}
TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SHARDED = EP2 | {"use_distributed_optimizer": True}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3_moe@ep2": (2, EP2),
    "qwen3_moe@sp2": (2, SP2),
    "deepseek_v3@rslora": (1, {}),
    "gpt_oss@alone": (1, {}),
    "qwen3@sp2": (2, SP2),
    "qwen2_5_vl@alone": (1, {}),
}
STAND_INS: dict[str, tuple[int, dict[str, Any]]] = {"qwen3_moe@te": (1, {})}
"""Under Megatron-core's wrappers of Transformer Engine's layers, whose experts are grouped."""
ROUNDING = dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "nemotron_h_moe"), 5e-5)
"""Rotary angles are float32 in both models, and so is the whole of a gated delta net or Mamba mixer."""
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {"resumed@ep2": (2, SHARDED)}
if ALL:
    RUNS |= {
        "llama@alone": (1, {}),
        "mistral@alone": (1, {}),
        "smollm3@alone": (1, {}),
        "qwen2@alone": (1, {}),
        "qwen3@alone": (1, {}),
        "qwen3_moe@alone": (1, {}),
        "qwen3@tp2": (2, TP2),
        "glm4@tp2": (2, TP2),
        "qwen3_moe@pp2": (2, PP2),
        "qwen3_moe@ep2-sp2": (4, EP2 | SP2 | {"expert_tensor_parallel_size": 1}),
        "qwen3_moe@ep2-dp2": (4, EP2),
        "qwen3_next@alone": (1, {}),
        "qwen3_next@sp2": (2, SP2),
        "qwen3_5@sp2": (2, SP2),
        "qwen3_5_moe@ep2": (2, EP2),
        "gpt_oss@ep2-sp2": (2, EP2 | SP2 | {"expert_tensor_parallel_size": 1}),
        "minimax_m2@alone": (1, {}),
        "minimax_m2@ep2": (2, EP2),
        "minimax_m2@sp2": (2, SP2),
        "nemotron_h@alone": (1, {}),
        "nemotron_h@sp2": (2, SP2),
        "nemotron_h@pp2": (2, PP2),
        "nemotron_h_moe@ep2": (2, EP2),
        "gemma3@alone": (1, {}),
        "gemma3_text@alone": (1, {}),
        "gemma3_text@sp2": (2, SP2),
        "gemma3_text@tp2": (2, TP2),
        "olmo3@alone": (1, {}),
        "olmo3@sp2": (2, SP2),
        "olmo3@tp2": (2, TP2),
        "qwen2_moe@sp2": (2, SP2),
        "glm4_moe@ep2": (2, EP2),
        "deepseek_v3@alone": (1, {}),
        "deepseek_v3@pp2": (2, PP2),
        "deepseek_v3@ep2": (2, EP2),
        "glm4_moe_lite@alone": (1, {}),
        "moonlight@ep2": (2, EP2),
        "kimi_k2@alone": (1, {}),
        "qwen2_5_vl@tp2": (2, TP2),
        "qwen2_5_vl@pp2": (2, PP2),
        "qwen3_vl@alone": (1, {}),
        "qwen3_vl@tp2": (2, TP2),
        "qwen3_vl@sp2": (2, SP2),
        "qwen3_vl@pp2": (2, PP2),
    }
    STAND_INS |= {
        "qwen3@te": (1, {}),
        "qwen3@te-sp2": (2, SP2),
        "qwen3_moe@te-sp2": (2, SP2),
        "qwen2_moe@te": (1, {}),
        "olmo3@te-sp2": (2, SP2),
        "gemma3_text@te-sp2": (2, SP2),
        "minimax_m2@te": (1, {}),
        "nemotron_h@te": (1, {}),
        "nemotron_h_moe@te-sp2": (2, SP2),
        "deepseek_v3@te": (1, {}),
        "deepseek_v3@te-ep2": (2, EP2),
    }
    RESUMED |= {"resumed@alone": (1, {}), "resumed@ep2-dp2": (4, SHARDED)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora-exact")
    cases: list[Any] = []
    for run, (ranks, megatron) in (RUNS | STAND_INS).items():
        model, section = folder / _family(run), _lora(folder, run)
        if not model.exists():
            (make_tiny_vision if model.name in VISION else make_tiny)(model, model.name)
        if not section["lora_load"].exists():
            make_adapters(model, section["lora_load"], LoraSection(**section))
        train = {"packing": "shared_prompts"}  # Transformer Engine's attention has no stand-in
        sections = {"lora": section | {"lora_load": str(section["lora_load"])}, "megatron": megatron, "train": train}
        cases.append(LoraCase(run, str(folder), str(model), sections, ranks, patch_values=VISION.get(model.name)))
    for run, (ranks, megatron) in RESUMED.items():
        sections = {"lora": LORA, "megatron": megatron}
        cases.append(Case(run, str(folder), str(folder / "qwen3_moe"), sections, ranks))
    for case in cases:
        if case.name in STAND_INS:
            run_on_stand_ins(case)
    cases = [case for case in cases if case.name not in STAND_INS]
    run_cases(folder, max(case.ranks for case in cases), cases)
    return folder


def _family(run: str) -> str:
    return run.split("@")[0]


def _lora(folder: Path, run: str) -> dict[str, Any]:
    section = RSLORA if run.endswith("rslora") else LORA
    if _family(run) == "gpt_oss":  # whose experts have adapters only by name
        section = section | {
            "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
        }
    return section | {"lora_load": folder / f"{_family(run)}-adapters{'-rslora' if section is RSLORA else ''}"}


def _summed(runs: Path, run: str) -> Merged:
    """6 / 4, or with rsLoRA 6 / √4."""
    model, section = runs / _family(run), _lora(runs, run)
    scale = 3.0 if "lora_use_rslora" in section else 1.5
    return Merged.of(
        vision_network(model) if model.name in VISION else network(model),
        model,
        section["lora_load"],
        LoraSection(**section),
        scale,
    )


@pytest.mark.parametrize("run", [*RUNS, *STAND_INS])
def test_log_probs_and_gradients_are_those_of_the_sum_of_weights_and_adapters(runs: Path, run: str) -> None:
    summed, bound = _summed(runs, run), ROUNDING.get(_family(run), 5e-6)
    losses = []
    batch = vision_cases.samples(VISION[_family(run)]) if _family(run) in VISION else samples(0)
    for row, sample in zip(json.loads((runs / run / "log_probs.json").read_text()), batch, strict=True):
        expected = log_probs_of(summed.network, sample)
        assert torch.allclose(torch.tensor(row, dtype=torch.float64), expected.detach(), rtol=0, atol=bound)
        if sample.failure is None:
            mask = torch.from_numpy(sample.loss_mask).double()
            losses.append(-(expected * mask).sum() / mask.sum().clamp(min=1))
    torch.stack(losses).mean().backward()
    found, wanted = gradients(runs / run), summed.gradients()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= bound * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("run", [*RUNS, *STAND_INS])
def test_weights_leave_with_the_adapters_added(runs: Path, run: str) -> None:
    summed = _summed(runs, run).network
    tensors = dict(summed.named_parameters()) | dict(summed.named_buffers())
    for name, weight in merged(runs / run).items():
        assert torch.allclose(weight.double(), view_of(tensors, name).double(), rtol=0, atol=1e-6), name


@pytest.mark.parametrize("run", [run for run in RUNS if _family(run) in ("qwen3", "glm4", *VISION)])
def test_adapters_leave_for_engines_as_peft_has_them(runs: Path, run: str) -> None:
    files = (runs / run / "published").glob("adapter_model*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    wanted = load_file(_lora(runs, run)["lora_load"] / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor.double()) for name, tensor in wanted.items())
    config = json.loads((runs / run / "published" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6.0)


@pytest.mark.parametrize("run", RESUMED)
def test_a_run_with_adapters_on_experts_goes_on_bit_for_bit(runs: Path, run: str) -> None:
    went_on, resumed = weights(runs / run / "twice_trained"), weights(runs / run / "resumed")
    assert all(torch.equal(went_on[name], resumed[name]) for name in went_on)
    before = weights(runs / run / "initial")
    assert all(torch.equal(before[name], weight) != ("_proj." in name) for name, weight in went_on.items())


@pytest.mark.parametrize("run", [run for run in RESUMED if run != "resumed@alone"] if ALL else [])
def test_training_of_experts_does_not_depend_on_the_layout(runs: Path, run: str) -> None:
    assert_same_training(runs / run, runs / "resumed@alone")
