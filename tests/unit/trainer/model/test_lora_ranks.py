"""LoRA in real ranks over gloo: equal to peft's package, to each other under every layout, and after a restart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.cli.main import main
from headrace.run_folder import RunFolder, ServiceEntry
from services.trainer.checkpoint.checkpoint import step_name
from tests.long_forms import ALL
from tests.support.models.float64_reference import log_probs_of
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.rank_cases import Case, samples
from tests.support.ranks.rank_results import assert_same_training, metrics, weights
from tests.support.ranks.ranks import Sections, run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ONE_STEP = {"num_steps_per_rollout": 1, "use_tis": False}
SFT = {"loss_type": "sft_loss", "num_steps_per_rollout": 1, "use_kl_loss": False}
TARGETS = {
    "qwen3": ["all-linear"],
    "llama": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "glm4": ["all-linear"],
    "gpt_oss": ["all-linear"],
}
RANK, ALPHA = 4, 6
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3@alone": (1, {}),
    "qwen3@tp2": (2, TP2),
    "qwen3@pp2": (2, PP2),
    "llama@alone": (1, {}),
}
OTHERS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dropped@alone": (1, {}, {}, {"lora_dropout": 0.3}),
    "dropped@tp2": (2, TP2, {}, {"lora_dropout": 0.3}),
    "kaiming@alone": (1, {}, ONE_STEP, {"lora_load": None}),
    "gaussian@alone": (1, {}, ONE_STEP, {"lora_load": None, "lora_init": "gaussian"}),
    "sgd": (1, {"optimizer": "sgd", "lr": 1e-2, "clip_grad": 0.0, "weight_decay": 0.0}, SFT, {"lora_init": "kaiming"}),
    "frozen-reference": (1, {}, {"use_rollout_logprobs": True} | ONE_STEP, {}),
    "started": (1, {}, {}, {"lora_load": None}),
}
"""Ranks, Megatron's arguments, the training's, and changes of the section of LoRA; all of Qwen3."""
if ALL:
    LAYOUTS |= {
        "qwen3@full": (1, FULL),
        "qwen3@sp2": (2, TP2 | {"sequence_parallel": True}),
        "qwen3@dp2": (2, DISTRIBUTED),
        "llama@tp2": (2, TP2),
        "glm4@alone": (1, {}),
        "glm4@tp2": (2, TP2),
        "gpt_oss@alone": (1, {}),
    }
    OTHERS |= {
        "kaiming@tp2": (2, TP2, ONE_STEP, {"lora_load": None}),
        "bf16": (2, DISTRIBUTED | {"bf16": True}, {}, {}),
        "follows": (2, TP2, ONE_STEP | {"ref_update_interval": 1, "keep_old_actor": True}, {}),
        "critic": (2, PP2, ONE_STEP | {"advantage_estimator": "ppo", "use_kl_loss": False}, {}),
    }
RUNS = [*LAYOUTS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases' results beside the models and peft's adapters that they began with."""
    folder = tmp_path_factory.mktemp("lora")
    for family in {run.split("@")[0] for run in LAYOUTS}:
        make_tiny(folder / family, family, tied=family == "qwen3")
        _adapters(folder / family, folder / f"{family}-adapters", TARGETS[family])
    make_tiny(folder / "reference", "qwen3", tied=True, seed=8)
    cases = [
        _case(folder, run, ranks, megatron, family=run.split("@")[0]) for run, (ranks, megatron) in LAYOUTS.items()
    ]
    cases += [_case(folder, run, *of_run[:3], **of_run[3]) for run, of_run in OTHERS.items()]
    start = {"checkpoint": {"initial_megatron_checkpoint": str(folder / "qwen3@alone" / "checkpoints" / step_name(1))}}
    more: dict[str, Sections] = {
        "frozen-reference": {"model": {"ref_load": str(folder / "reference")}},
        "started": start,
    }
    cases = [replace(case, sections={**case.sections, **more.get(case.name, {})}) for case in cases]
    cases.append(Case("refused", str(folder), str(folder / "qwen3"), start, 1, work="refuse"))
    run_cases(folder, 2, cases)
    return folder


def _case(
    folder: Path,
    name: str,
    ranks: int,
    megatron: dict[str, Any],
    train: dict[str, Any] | None = None,
    family: str = "qwen3",
    **lora: Any,
) -> Case:
    """With adapters of lora_rank and lora_alpha on lora_target_modules, from lora_load."""
    section = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_target_modules": TARGETS[family]}
    sections: Sections = {
        "lora": section | {"lora_load": str(folder / f"{family}-adapters")} | lora,
        "buffer": {"max_staleness": 1},
        "critic": {"critic_lr": 1e-2},
        "megatron": megatron,
        "train": train or {},
    }
    return Case(name, str(folder), str(folder / family), sections, ranks, staleness=1)


def _adapters(model: Path, folder: Path, targets: list[str]) -> None:
    torch.manual_seed(3)
    chosen: Any = targets[0] if targets == ["all-linear"] else targets
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=chosen, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(str(folder))


def _of_peft(runs: Path, family: str) -> Any:
    base = AutoModelForCausalLM.from_pretrained(runs / family, dtype=torch.float64, experts_implementation="eager")
    return PeftModel.from_pretrained(base, runs / f"{family}-adapters", is_trainable=True).double().eval()


@pytest.mark.parametrize("run", RUNS)
def test_log_probs_are_those_of_peft_and_weights_leave_merged(runs: Path, run: str) -> None:
    """And training changes the layers that have adapters alone."""
    network, targets = _of_peft(runs, run.split("@")[0]), TARGETS[run.split("@")[0]]
    for row, sample in zip(json.loads((runs / run / "log_probs.json").read_text()), samples(0), strict=True):
        with torch.no_grad():
            expected = log_probs_of(network, sample)
        assert torch.allclose(torch.tensor(row, dtype=torch.float64), expected, rtol=0, atol=1e-4)
    merged: dict[str, Tensor] = network.merge_and_unload().state_dict()
    after = weights(runs / run / "twice_trained")
    for name, weight in weights(runs / run / "initial").items():
        assert torch.allclose(weight.double(), merged[name], rtol=0, atol=1e-6), name
        is_adapted = name.endswith("_proj.weight") and (targets == ["all-linear"] or name.split(".")[-2] in targets)
        assert torch.equal(weight, after[name]) != is_adapted, name


def test_gradients_of_adapters_are_those_of_peft(runs: Path) -> None:
    """One step of gradient descent on the mean over samples of the mean over their trained tokens, 0 without any."""
    network = _of_peft(runs, "qwen3")
    used = [sample for sample in samples(0) if sample.failure is None]
    losses = [
        -(log_probs_of(network, s) * (m := torch.from_numpy(s.loss_mask).double())).sum() / m.sum().clamp(min=1)
        for s in used
    ]
    torch.stack(losses).mean().backward()
    found, before = weights(runs / "sgd" / "trained"), weights(runs / "sgd" / "initial")
    modules = dict(network.named_modules())
    for name, weight in before.items():
        layer = modules.get(f"base_model.model.{name.removesuffix('.weight')}")
        if not hasattr(layer, "lora_A"):
            assert torch.equal(found[name], weight), name
            continue
        a, b = (getattr(layer, each).default.weight for each in ("lora_A", "lora_B"))
        moved = (b - 1e-2 * b.grad) @ (a - 1e-2 * a.grad) - b @ a
        error = (found[name] - weight).double() - ALPHA / RANK * moved
        assert error.norm() < 1e-3 * moved.norm(), name


@pytest.mark.parametrize("run", [run for run in (*RUNS, *OTHERS) if "@" in run and not run.endswith("@alone")])
def test_training_does_not_depend_on_the_layout(runs: Path, run: str) -> None:
    """Nor do the initial adapters, and what lora_dropout drops."""
    assert_same_training(runs / run, runs / f"{run.split('@')[0]}@alone")


@pytest.mark.parametrize("run", [*RUNS, *OTHERS])
def test_a_restored_run_goes_on_bit_for_bit(runs: Path, run: str) -> None:
    went_on, resumed = weights(runs / run / "twice_trained"), weights(runs / run / "resumed")
    assert all(torch.equal(went_on[name], resumed[name]) for name in went_on)
    _, second, restored = metrics(runs / run)
    assert {n: v for n, v in second.items() if "loss" in n} == {n: v for n, v in restored.items() if "loss" in n}
    assert second["grad_norm"] == restored["grad_norm"] > 0


def test_lora_dropout_changes_training_passes_alone(runs: Path) -> None:
    dropped, plain = runs / "dropped@alone", runs / "qwen3@alone"
    assert (dropped / "log_probs.json").read_text() == (plain / "log_probs.json").read_text()
    assert metrics(dropped)[0]["grad_norm"] != pytest.approx(metrics(plain)[0]["grad_norm"], rel=1e-3)


def test_new_adapters_leave_the_model_as_it_is_and_lora_init_is_where_training_begins(runs: Path) -> None:
    kaiming, gaussian = (metrics(runs / f"{init}@alone")[0] for init in ("kaiming", "gaussian"))
    assert kaiming["grad_norm"] != pytest.approx(gaussian["grad_norm"], rel=0.1)
    assert kaiming["loss/kl"] == gaussian["loss/kl"] == 0.0, "the reference is the model without adapters"
    base = weights(runs / "qwen3")
    for init in ("kaiming", "gaussian"):
        initial = weights(runs / f"{init}@alone" / "initial")
        assert all(torch.equal(initial[name], weight) for name, weight in base.items())


def test_a_reference_of_its_own_has_no_adapters(runs: Path) -> None:
    """The first step's KL is to the folder's model, in float64."""
    policy = _of_peft(runs, "qwen3")
    reference = AutoModelForCausalLM.from_pretrained(runs / "reference", dtype=torch.float64).eval()
    total, used = 0.0, [s for s in samples(0) if s.failure is None]
    for sample in used:
        mask = torch.from_numpy(sample.loss_mask).double()
        with torch.no_grad():
            d = log_probs_of(policy, sample) - log_probs_of(reference, sample)
        kl = ((-d).exp() - 1 + d).clamp(-10, 10)
        total += float((kl * mask).sum() / mask.sum().clamp(min=1))
    assert metrics(runs / "frozen-reference")[0]["loss/kl"] == pytest.approx(total / len(used), rel=1e-4)


def test_another_run_starts_from_the_adapters_of_a_checkpoint(runs: Path) -> None:
    started, saved = weights(runs / "started" / "initial"), weights(runs / "qwen3@alone" / "trained")
    assert all(torch.equal(started[name], weight) for name, weight in saved.items())
    assert "has adapters of LoRA" in (runs / "refused" / "error.txt").read_text()


def test_a_checkpoint_is_exported_as_peft_has_it(runs: Path, tmp_path: Path) -> None:
    """By `headrace export`, from two tensor ranks' shards."""
    run = RunFolder(tmp_path / "run")
    run.create(_case(runs, "qwen3@tp2", 2, TP2, lora_load=None).job())
    run.write_services({"trainer": ServiceEntry("127.0.0.1:1", None, 2**22 + 1)})
    assert main(["export", str(tmp_path / "adapters"), str(run.path), "--format", "peft"]) == 0
    base = AutoModelForCausalLM.from_pretrained(runs / "qwen3", dtype=torch.float64)
    merged = PeftModel.from_pretrained(base, tmp_path / "adapters").double().merge_and_unload().state_dict()
    for name, weight in weights(runs / "qwen3@tp2" / "trained").items():
        assert torch.allclose(merged[name], weight.double(), rtol=0, atol=1e-6), name
