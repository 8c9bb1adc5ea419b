"""Models, layouts and flags that cannot work together are refused with a sentence that says what to change."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import ConfigError
from headrace.models.registry import read_architecture
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.rank_cases import Case
from tests.support.ranks.ranks import run_cases

TP2, EP2 = {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
REFUSED = {
    "lacks-a-tensor": r"lacks 1 tensors that its config.json asks for: \['model.layers.1.mlp.up_proj.weight'\]",
    "holds-a-stranger": r"holds 1 tensors that its config.json does not name: \['model.layers.2.stranger'\]",
    "other-shape": r"model.norm.weight: shapes \[\[63\]\] are not \[\[64\]\]: the weights and config.json",
    "no-weights": r"has neither model.safetensors nor model.safetensors.index.json",
    "contradiction": r"--num-layers 3 contradicts the checkpoint, whose config.json says 2: leave the flag out",
    "too-few-ranks": r"2 ranks cannot be divided into tensor_model_parallel_size 2 × .*: use a multiple of 4",
    "odd-vocabulary": r"tensor_model_parallel_size 2 does not divide vocab_size 321: choose a divisor of it",
    "experts-with-tensor-ranks": r"tensor_model_parallel_size 2 with experts: .* only with --sequence-parallel: add it",
    "latents": r"sequence_parallel with the latent attention of deepseek_v3 needs Transformer Engine, .* at 1",
    "divided-experts": r"expert_model_parallel_size 2 with 2 tensor ranks in each expert needs a GPU: .*-size 1",
    "unsummed-experts": r"expert_tensor_parallel_size 1 with .*_size 2: .* add --expert-model-parallel-size 2",
    "odd-experts": r"expert_model_parallel_size 2 does not divide the 3 experts: choose a divisor of it",
    "no-experts": r"expert_model_parallel_size 2: this qwen3 model has no experts: leave it out",
    "too-many-stages": r"pipeline_model_parallel_size 2 does not divide num_layers 3: choose a divisor of it",
    "wrong-layers": "Megatron-core refuses",
    "no-such-parameter": "'lora' matches no parameter's name",
    "nothing-to-train": "nothing is left to train",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each case's folder has the message it was refused with."""
    folder = tmp_path_factory.mktemp("refusals")
    good = make_tiny(folder / "good", "qwen3", tied=False)
    _damaged(good, folder / "lacks", without="model.layers.1.mlp.up_proj.weight")
    _damaged(good, folder / "extra", extra={"model.layers.2.stranger": torch.zeros(3)})
    _damaged(good, folder / "shape", extra={"model.norm.weight": torch.zeros(63)})
    (folder / "empty").mkdir()
    shutil.copyfile(good / "config.json", folder / "empty" / "config.json")
    make_tiny(folder / "odd", "qwen3", tied=True, vocab_size=321)
    make_tiny(folder / "three-layers", "qwen3", tied=True, num_layers=3)
    make_tiny(folder / "experts", "qwen3_moe")
    make_tiny(folder / "three-experts", "qwen3_moe", num_experts=3)
    make_tiny(folder / "latents", "deepseek_v3")
    of_case: dict[str, tuple[str, dict[str, object]]] = {
        "lacks-a-tensor": ("lacks", {}),
        "holds-a-stranger": ("extra", {}),
        "other-shape": ("shape", {}),
        "no-weights": ("empty", {}),
        "contradiction": ("good", {"num_layers": 3}),
        "too-few-ranks": ("good", TP2 | {"pipeline_model_parallel_size": 2}),
        "odd-vocabulary": ("odd", TP2),
        "experts-with-tensor-ranks": ("experts", TP2),
        "latents": ("latents", TP2 | {"sequence_parallel": True}),
        "divided-experts": ("experts", TP2 | EP2 | {"sequence_parallel": True}),
        "unsummed-experts": ("experts", TP2 | {"sequence_parallel": True, "expert_tensor_parallel_size": 1}),
        "odd-experts": ("three-experts", EP2),
        "no-experts": ("good", EP2),
        "too-many-stages": ("three-layers", {"pipeline_model_parallel_size": 2}),
        "wrong-layers": ("good", {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}),
    }
    sections = {name: (model, {"megatron": megatron}) for name, (model, megatron) in of_case.items()}
    sections["no-such-parameter"] = ("good", {"train": {"freeze_params_name_list": ["lora"]}})
    sections["nothing-to-train"] = ("good", {"train": {"freeze_params_name_list": ["."]}})
    cases = [
        Case(name, str(folder), str(folder / model), of_model, work="refuse")
        for name, (model, of_model) in sections.items()
    ]
    run_cases(folder, 2, cases)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_training(refusals: Path, name: str) -> None:
    assert re.search(REFUSED[name], (refusals / name / "error.txt").read_text())


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json: name a Hugging Face model folder"):
        read_architecture(tmp_path)


def _damaged(good: Path, folder: Path, *, without: str = "", extra: dict[str, torch.Tensor] | None = None) -> None:
    folder.mkdir()
    shutil.copyfile(good / "config.json", folder / "config.json")
    tensors = {name: tensor for file in good.glob("*.safetensors") for name, tensor in load_file(file).items()}
    tensors.pop(without, None)
    save_file(tensors | (extra or {}), folder / "model.safetensors")
