"""What the ranks left in a case's folder, compared with transformers and with each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.models.registry import read_architecture
from services.trainer.hugging_face.hf_folder import passthrough_names
from tests.support.models.float64_reference import log_probs_of
from tests.support.ranks.rank_cases import samples

REPORTED = ("loss/policy", "loss/kl", "entropy", "grad_norm", "ratio/mean", "tokens", "log_prob_diff/mean")


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def metrics(case: Path) -> list[dict[str, float]]:
    """Of each rollout step."""
    found: list[dict[str, float]] = json.loads((case / "metrics.json").read_text())
    return found


def network(folder: Path) -> AutoModelForCausalLM:
    """The transformers model of a folder, in float64; Kimi K2 is DeepSeek V3's under another name."""
    values = json.loads((folder / "config.json").read_text())
    values["model_type"] = {"kimi_k2": "deepseek_v3"}.get(values["model_type"], values["model_type"])
    config = AutoConfig.for_model(**values)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


def assert_log_probs_of_transformers(case: Path, model: Path) -> None:
    """Every response token's, within 1e-4."""
    found, table = json.loads((case / "log_probs.json").read_text()), network(model)
    for row, sample in zip(found, samples(0), strict=True):
        with torch.no_grad():
            expected = log_probs_of(table, sample)
        assert torch.allclose(torch.tensor(row, dtype=torch.float64), expected, rtol=0, atol=1e-4)


def assert_round_trip(case: Path, model: Path) -> None:
    """The model that was exported before training is the one that was loaded, bit for bit."""
    original, returned = weights(model), weights(case / "initial")
    assert returned.keys() == original.keys()
    assert [name for name in original if not torch.equal(returned[name], original[name])] == []


def assert_same_training(case: Path, other: Path) -> None:
    """Losses, gradient norms and weights of both rollout steps, within 1e-5."""
    for mine, theirs in zip(metrics(case), metrics(other), strict=True):
        for name in REPORTED:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    for folder in ("trained", "twice_trained"):
        expected = weights(other / folder)
        for name, weight in weights(case / folder).items():
            distance = (weight - expected[name]).norm() / expected[name].norm()
            assert distance < 1e-5, f"{folder} {name}: {distance:.2e}"


def assert_trained_and_resumed(case: Path) -> None:
    """Every weight but router biases and those that are kept has moved, and a restored run went on bit for bit."""
    before, after, resumed = (weights(case / folder) for folder in ("trained", "twice_trained", "resumed"))
    kept = passthrough_names(after, read_architecture(case / "initial"))
    for name, weight in after.items():
        assert torch.equal(resumed[name], weight), name
        stays = name.endswith("e_score_correction_bias") or name in kept
        assert torch.equal(before[name], weight) == stays, name
    _, went_on, restored = metrics(case)
    assert [went_on[name] for name in REPORTED] == [restored[name] for name in REPORTED]
