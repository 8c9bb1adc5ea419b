"""Tinker's models in real ranks in float64 are peft's with torch's AdamW, under every layout they may have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.long_forms import ALL
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.rank_results import network
from tests.support.ranks.ranks import run_cases
from tests.support.ranks.tinker_cases import ADAM, MODELS, RATES, STEPS, TinkerCase, data

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "sp2": (2, TP2 | {"sequence_parallel": True}),
    "dp2": (2, {}),
}
if ALL:
    LAYOUTS |= {"tp2": (2, TP2), "tp2-dp2": (4, TP2)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinker")
    make_tiny(folder / "qwen3", "qwen3")
    cases = [
        TinkerCase(name, str(folder), str(folder / "qwen3"), {"megatron": megatron}, ranks)
        for name, (ranks, megatron) in LAYOUTS.items()
    ]
    run_cases(folder, max(ranks for ranks, _ in LAYOUTS.values()), cases)
    return folder


def _losses(name: str, settings: Any, log_probs: torch.Tensor, datum: Any) -> torch.Tensor:
    """Written down from Tinker's documents."""
    column = {key: torch.tensor(datum[key], dtype=torch.float64) for key in ("weights", "logprobs", "advantages")}
    if name == "cross_entropy":
        return -(log_probs * column["weights"]).sum()
    advantages, ratio = column["advantages"], torch.exp(log_probs - column["logprobs"])
    clipped = torch.clamp(ratio, 0.8, settings.get("clip_high_threshold", 1.2))
    return {
        "importance_sampling": -(ratio * advantages).sum(),
        "ppo": -torch.min(ratio * advantages, clipped * advantages).sum(),
        "cispo": -(clipped.detach() * log_probs * advantages).sum(),
        "dro": -(
            log_probs * advantages - 0.5 * settings.get("beta", 0.05) * (log_probs - column["logprobs"]) ** 2
        ).sum(),
    }[name]


def _trained_by_peft(folder: Path, layout: str) -> tuple[list[Any], dict[str, Any]]:
    results: list[Any] = []
    models: dict[str, Any] = {}
    for name, spec in MODELS.items():
        model = PeftModel.from_pretrained(
            network(folder / "qwen3"), folder / layout / "initial" / name, is_trainable=True
        )
        chosen = [
            parameter.requires_grad_(spec.get("train_mlp", True) or ".self_attn." in key)
            for key, parameter in model.named_parameters()
            if ".lora_" in key
        ]
        models[name] = model.double(), torch.optim.AdamW([each for each in chosen if each.requires_grad])
    for number, (name, loss, settings) in enumerate(STEPS):
        model, optimizer = models[name]
        for part in range(2):
            total, rows = torch.zeros((), dtype=torch.float64), []
            for datum in data(2 * number + part):
                logits = model(torch.tensor([datum["tokens"]])).logits[0]
                log_probs = logits.log_softmax(-1).gather(1, torch.tensor(datum["targets"])[:, None])[:, 0]
                rows.append(log_probs.tolist())
                total = total + _losses(loss, settings, log_probs, datum)
            total.backward()
            results.append({"log_probs": rows, "loss": total.item()})
        weights = optimizer.param_groups[0]["params"]
        results.append(float(torch.nn.utils.clip_grad_norm_(weights, ADAM["grad_clip_norm"])))
        optimizer.param_groups[0].update(
            lr=RATES[number % 2], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"], weight_decay=0.01
        )
        optimizer.step()
        optimizer.zero_grad()
    return results, {name: model for name, (model, _) in models.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_models_that_take_turns_are_trained_as_peft_and_adamw_train_them(runs: Path, layout: str) -> None:
    found = json.loads((runs / layout / "results.json").read_text())
    expected, models = _trained_by_peft(runs, layout)
    for mine, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, float):
            assert mine == pytest.approx(theirs, rel=1e-5)
            continue
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
        for row, other in zip(mine["log_probs"], theirs["log_probs"], strict=True):
            assert row == pytest.approx(other, abs=5e-6)
    for name, model in models.items():
        theirs = dict(model.named_parameters())
        for key, matrix in load_file(runs / layout / "trained" / name / "adapter_model.safetensors").items():
            of_peft = theirs[key.replace(".weight", ".default.weight")]
            assert torch.allclose(matrix, of_peft, rtol=1e-4, atol=1e-6), key


def test_a_model_begins_alike_under_every_layout(runs: Path) -> None:
    for name in MODELS:
        first, *others = (load_file(runs / each / "initial" / name / "adapter_model.safetensors") for each in LAYOUTS)
        for other in others:
            assert all(torch.equal(first[key], other[key]) for key in first)
