"""MiniMax-M2: the published names, shapes and FP8 form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.errors import ConfigError
from headrace.models.folders import QuantizedForm
from headrace.models.registry import PRESETS, architecture, table

CONFIG = dict(PRESETS["minimax-m2"].config)
PUBLISHED = {
    "activation_scheme": "dynamic",
    "fmt": "float8_e4m3fn",
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def test_the_preset_has_the_published_size_and_names() -> None:
    a = architecture(CONFIG)
    counted = table(a)
    assert counted.num_parameters == 228_689_764_864
    shapes = {tensor.name: tensor.shape for tensor in counted.tensors()}
    layer = {name.removeprefix("model.layers.61."): shape for name, shape in shapes.items() if ".61." in name}
    assert layer["self_attn.q_norm.weight"] == (48 * 128,)
    assert layer["self_attn.k_norm.weight"] == (8 * 128,)
    assert layer["block_sparse_moe.gate.weight"] == (256, 3072)
    assert layer["block_sparse_moe.e_score_correction_bias"] == (256,)
    assert layer["block_sparse_moe.experts.255.w1.weight"] == (1536, 3072)
    assert layer["block_sparse_moe.experts.255.w2.weight"] == (3072, 1536)
    assert layer["block_sparse_moe.experts.255.w3.weight"] == (1536, 3072)
    assert a.rotary_percent == 0.5
    assert a.kept == ("model.layers.62.", "model.layers.63.", "model.layers.64.")


def test_the_published_fp8_form_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": PUBLISHED}))
    save_file({"w1.weight": torch.zeros(1), "w1.weight_scale_inv": torch.ones(1)}, tmp_path / "model.safetensors")
    assert QuantizedForm.of(tmp_path) == QuantizedForm(frozenset({"w1.weight"}), (128, 128), 1)


@pytest.mark.parametrize(
    "changed",
    [{"scoring_func": "softmax"}, {"use_qk_norm": False}, {"qk_norm_type": "per_head"}, {"use_routing_bias": False}],
)
def test_another_routing_or_norm_is_refused(changed: dict[str, object]) -> None:
    (name,) = changed
    with pytest.raises(ConfigError, match=f"{name} .* is not supported; supported: "):
        architecture(CONFIG | changed)
