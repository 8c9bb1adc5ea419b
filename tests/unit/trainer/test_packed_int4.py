"""Folders in packed INT4, as Kimi K2 Thinking is published: how they are read, and in which form they are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from headrace.errors import AlreadyExists, ConfigError
from headrace.models.folders import BlockFp8
from services.trainer.hugging_face.hf_folder import HfFolder
from services.trainer.hugging_face.rewrite import to_plain as program
from services.trainer.hugging_face.rewrite.to_fp8 import to_fp8
from services.trainer.hugging_face.rewrite.to_plain import to_plain

GROUP = 32
EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"
ODD = "model.layers.1.mlp.experts.0.up_proj.weight"
NORM = "model.norm.weight"
SHAPES = {EXPERT: (128, 256), ODD: (3, 72)}
WEIGHTS = {"num_bits": 4, "group_size": GROUP, "strategy": "group", "symmetric": True, "type": "int", "actorder": None}


def quantization(**changed: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | changed, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Packed by compressed-tensors itself."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {NORM: torch.randn(64)}
    for name, (rows, columns) in SHAPES.items():
        tensors[f"{name}_packed"] = pack_to_int32(values_of(name), 4).contiguous()
        tensors[f"{name}_scale"] = torch.randn(rows, -(-columns // GROUP)).bfloat16()
        tensors[f"{name}_shape"] = torch.tensor([rows, columns])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "quantization_config": quantization()}))
    return folder


def values_of(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(-8, 8, SHAPES[name], generator=generator, dtype=torch.int8)


def expected(model: Path, name: str) -> torch.Tensor:
    scale = load_file(model / "model.safetensors")[f"{name}_scale"].float()
    values = values_of(name).float()
    return torch.stack([values[:, n] * scale[:, n // GROUP] for n in range(values.shape[1])], dim=1)


def test_what_compressed_tensors_packs_is_read_exactly(model: Path) -> None:
    folder = HfFolder(model)
    assert folder.names == {NORM, EXPERT, ODD}
    for name, shape in SHAPES.items():
        assert folder.shape(name) == shape
        assert folder.tensor(name).equal(expected(model, name))


def test_it_is_written_in_bfloat16_or_in_fp8(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["to_plain", str(model), str(tmp_path / "plain")])
    assert program.main() == 0
    assert "3 tensors in bfloat16" in capsys.readouterr().out
    plain = HfFolder(tmp_path / "plain")
    assert plain.tensor(EXPERT).equal(expected(model, EXPERT).bfloat16())
    assert plain.tensor(NORM).dtype == torch.float32
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert to_fp8(model, tmp_path / "fp8").weights == {EXPERT}
    exact = expected(model, EXPERT)
    assert ((HfFolder(tmp_path / "fp8").tensor(EXPERT) - exact).abs() <= exact.abs() / 16 + 0.01).all()
    assert program.main() == 2
    with pytest.raises(AlreadyExists, match="exists already"):
        to_plain(model, tmp_path / "plain")


def test_engines_cannot_be_given_it_and_a_job_says_in_which_form_they_can(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"in INT4 .*to_plain MODEL FOLDER .bfloat16., or python -m .*to_fp8"):
        BlockFp8.of(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (quantization(num_bits=8), "has num_bits 8. headrace reads pack-quantized INT4"),
        (quantization() | {"format": "marlin-24"}, "format 'marlin-24'"),
        (quantization(group_size=64), r"factors of shape \[128, 8\]; groups of 64 need \[128, 32\] and \[128, 4\]"),
    ],
)
def test_another_packing_is_refused(model: Path, config: dict[str, Any], message: str) -> None:
    (model / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ConfigError, match=message):
        HfFolder(model).tensor(EXPERT)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda tensors: tensors.pop(f"{EXPERT}_shape"), "is there without .*weight_shape: download the whole model"),
        (lambda tensors: tensors.update({f"{EXPERT}_shape": torch.tensor([1, 2, 3])}), "has 3 numbers"),
    ],
)
def test_a_weight_whose_parts_are_not_all_there_is_refused(
    model: Path, break_it: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    tensors = load_file(model / "model.safetensors")
    break_it(tensors)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        HfFolder(model).tensor(EXPERT)
