"""Adapters without ranks: their initial values, their folder as peft has it, and the order of their outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace.errors import AlreadyExists, ConfigError
from headrace.job.model import adapted_layers
from headrace.job.schema.training import LoraSection
from headrace.models.family import HfTensor
from headrace.models.registry import read_architecture
from services.trainer.model.lora import CONFIG, WEIGHTS, InitialPairs, PeftFolder, scale_of, write_peft
from tests.support.models.adapters import Merged, make_adapters
from tests.support.models.tiny_families import make_tiny
from tests.support.models.tiny_vision import make_tiny_vision, vision_network
from tests.support.ranks.rank_results import network

LORA = LoraSection(lora_rank=4, lora_alpha=16.0, lora_target_modules=("q_proj", "down_proj"))
WEIGHT = HfTensor("model.layers.0.self_attn.q_proj.weight", (128, 64))


@pytest.mark.parametrize(("init", "deviation"), [("kaiming", 1 / (3 * 64) ** 0.5), ("gaussian", 1 / 256)])
def test_a_begins_as_in_peft_and_b_at_zero(init: str, deviation: float) -> None:
    pair = InitialPairs(256, init, seed=1)(WEIGHT)
    assert (pair.a.shape, pair.b.shape) == ((256, 64), (128, 256))
    assert not pair.b.any()
    assert pair.a.std().item() == pytest.approx(deviation, rel=0.02)
    assert (pair.a.abs().max() <= 1 / 64**0.5) == (init == "kaiming") or init == "gaussian"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model", "qwen3", tied=True)


def _targets(model: Path) -> list[HfTensor]:
    return adapted_layers(read_architecture(model), LORA.lora_target_modules)


def _folder(model: Path, folder: Path, lora: LoraSection = LORA) -> PeftFolder:
    return PeftFolder(folder, read_architecture(model), lora)


def _written(model: Path, folder: Path, lora: LoraSection = LORA) -> Path:
    matrices = {}
    for tensor in _targets(model):
        layer = tensor.name.removesuffix(".weight")
        pair = InitialPairs(4, "gaussian", seed=3)(tensor)
        matrices |= {f"{layer}.lora_A.weight": pair.a, f"{layer}.lora_B.weight": torch.randn(pair.b.shape)}
    write_peft(folder, model, read_architecture(model), lora, matrices)
    return folder


@pytest.mark.parametrize(("lora_use_rslora", "scale"), [(False, 4.0), (True, 8.0)])
def test_what_is_written_is_what_peft_reads_and_what_lora_load_reads(
    model: Path, tmp_path: Path, lora_use_rslora: bool, scale: float
) -> None:
    lora = LORA.model_copy(update={"lora_use_rslora": lora_use_rslora})
    folder = _written(model, tmp_path / "adapters", lora)
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)
    source = _folder(model, folder, lora)
    assert scale_of(lora) == scale
    for tensor in _targets(model):
        layer = network.get_submodule(f"base_model.model.{tensor.name.removesuffix('.weight')}")
        pair = source(tensor)
        assert torch.equal(pair.a, layer.lora_A.default.weight)
        assert torch.equal(pair.b, layer.lora_B.default.weight)
        assert layer.scaling == {"default": scale}
    with pytest.raises(AlreadyExists, match="name another folder"):
        _written(model, folder)


LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_moe", ("all-linear",)),
        ("deepseek_v3", LATENT),
        ("qwen2_5_vl", ("all-linear",)),
        ("gemma3", ("all-linear",)),
        ("qwen3_vl", ("all-linear",)),
        ("gpt_oss", ("q_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("gpt_oss", ("gate_up_proj",)),
        ("gpt_oss", ("down_proj",)),
    ],
)
def test_peft_finds_experts_latents_and_a_decoder_beside_a_tower(
    tmp_path: Path, family: str, words: tuple[str, ...]
) -> None:
    """Its logits are those of the model with the adapters added."""
    is_vision, lora = family.endswith("_vl"), LoraSection(lora_rank=4, lora_alpha=6.0, lora_target_modules=words)
    model = (make_tiny_vision if is_vision else make_tiny)(tmp_path / family, family)
    folder, load = make_adapters(model, tmp_path / "adapters", lora), vision_network if is_vision else network
    tokens = torch.tensor([[5, 17, 256, 40, 8, 99]])
    with torch.no_grad():
        found = PeftModel.from_pretrained(load(model), folder).double().eval()(tokens).logits
        expected = Merged.of(load(model), model, folder, lora, 1.5).network(tokens).logits
        assert not torch.allclose(expected, load(model)(tokens).logits, atol=1e-2)
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora_alpha": 8}, "lora_alpha is 8 there and 16.0 here: pass --lora-alpha"),
        ({"peft_type": "LOHA"}, "peft_type is LOHA there"),
        ({"bias": "all"}, "bias is all there and none here"),
        ({"use_dora": True}, "use_dora is set"),
        ({"use_rslora": True}, "use_rslora is True there and False here: pass --lora-use-rslora"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is set"),
    ],
)
def test_adapters_of_another_form_are_refused(model: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = _written(model, tmp_path / "adapters")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=said):
        _folder(model, folder)


def test_adapters_of_other_layers_or_shapes_are_refused(model: Path, tmp_path: Path) -> None:
    folder, weight = _written(model, tmp_path / "adapters"), _targets(model)[0]
    for words, said in ((("q_proj",), r"it lacks 0 .* and has 4 more"), (("q_proj", "down_proj", "k_proj"), "lacks 4")):
        with pytest.raises(ConfigError, match=said):
            _folder(model, folder, LORA.model_copy(update={"lora_target_modules": words}))
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    for wrong in (torch.zeros(4, 32), torch.full((4, 64), float("nan")), torch.zeros(4, 64, dtype=torch.int32)):
        save_file(tensors | {name: wrong}, folder / WEIGHTS)
        with pytest.raises(ConfigError, match="must be finite numbers of shape"):
            _folder(model, folder)(weight)


@pytest.mark.parametrize("content", [b"[1]", b"[" * 100_000])
def test_a_folder_that_is_damaged_is_refused(model: Path, tmp_path: Path, content: bytes) -> None:
    folder = _written(model, tmp_path / "adapters")
    (folder / CONFIG).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        _folder(model, folder)
    _written(model, tmp_path / "others")
    (tmp_path / "others" / WEIGHTS).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        _folder(model, tmp_path / "others")
