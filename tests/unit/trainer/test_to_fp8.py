"""Folders in block FP8: what is written, what is read of them, and what `headrace check` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.cli.main import main
from headrace.errors import AlreadyExists, ConfigError
from headrace.models.folders import BlockFp8
from services.trainer.hugging_face.hf_folder import HfFolder
from services.trainer.hugging_face.rewrite import to_fp8 as program
from services.trainer.hugging_face.rewrite.to_fp8 import to_fp8

SHAPES = {
    "model.embed_tokens.weight": (320, 128),
    "model.layers.0.self_attn.q_proj.weight": (130, 128),
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (6, 256),
    "model.layers.0.mlp.down_proj.weight": (128, 200),
    "model.layers.0.mlp.gate.weight": (4, 128),
    "model.layers.0.input_layernorm.weight": (128,),
    "model.layers.1.eh_proj.weight": (128, 256),
    "lm_head.weight": (320, 128),
}
IN_FP8 = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    torch.manual_seed(3)
    weights = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_projections_become_fp8_within_half_a_step_and_all_else_stays_bit_for_bit(plain: Path, tmp_path: Path) -> None:
    form = to_fp8(plain, tmp_path / "fp8", file_bytes=50_000)
    assert form.weights == IN_FP8
    assert BlockFp8.of(tmp_path / "fp8") == form
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 1
    assert (tmp_path / "fp8" / "tokenizer.json").is_file()
    before, after = load_file(plain / "model.safetensors"), HfFolder(tmp_path / "fp8")
    assert after.names == before.keys()
    for name, weight in before.items():
        found = after.tensor(name)
        if name in IN_FP8:
            assert ((found - weight.float()).abs() <= weight.float().abs() / 16 + 4.0 / 448 / 512).all()
        else:
            assert found.dtype == torch.bfloat16
            assert found.equal(weight)


def test_a_folder_is_written_once_and_whole(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["to_fp8", str(plain), str(tmp_path / "fp8")])
    assert program.main() == 0
    assert "2 of 8 tensors in FP8" in capsys.readouterr().out
    assert program.main() == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(AlreadyExists):
        to_fp8(plain, tmp_path / "fp8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "plain"]


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, r"weight_block_size \[1, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
    ],
)
def test_other_quantizations_are_refused_with_what_they_are(
    plain: Path, quantization: dict[str, object], said: str
) -> None:
    assert BlockFp8.of(plain) is None
    (plain / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(ConfigError, match=f"quantization_config has {said}. headrace gives engines bfloat16, or FP8"):
        BlockFp8.of(plain)


def test_check_refuses_a_machine_whose_engines_cannot_compute_in_fp8(
    job_file: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": blocks}))
    weight = torch.zeros(1000, 1280).to(torch.float8_e4m3fn)
    tensors = {"q_proj.weight": weight, "q_proj.weight_scale_inv": torch.ones(8, 10), "norm.weight": torch.ones(5000)}
    save_file(tensors, model / "model.safetensors")
    assert main(["check", str(job_file), "--fast"]) == 2
    refused = " ".join("".join(capsys.readouterr()).split())
    assert re.search(r"hf_checkpoint \S+ is in block FP8, in which SGLang computes only on a GPU", refused)
    assert main(["check", str(job_file), "--fast", "--elsewhere", "--bf16"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "engines serve block FP8: 1 of 2 tensors, 1.3 MB a publication" in printed
