"""Folders in block FP8 and in packed INT4: what is written, what is read of them, and what `headrace check` says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from safetensors.torch import load_file, save_file

from headrace.cli.main import main
from headrace.errors import AlreadyExists, ConfigError, InvalidArgument
from headrace.models.folders import QuantizedForm
from headrace.models.registry import PRESETS, read_architecture, table
from headrace.publication import TensorSpec
from services.trainer.hugging_face.export import write_passthrough_layers
from services.trainer.hugging_face.hf_folder import HfFolder, check_names
from services.trainer.hugging_face.rewrite import to_plain as program
from services.trainer.hugging_face.rewrite.to_fp8 import to_fp8
from services.trainer.hugging_face.rewrite.to_plain import to_plain
from services.trainer.weights.engine_layout import EngineChecksums
from services.trainer.weights.quantization import quantized, quantized_specs, unpacked_int4
from tests.support.models.tiny_families import make_tiny
from tests.support.models.tiny_variants import add_mtp_layer
from tests.support.ranks.rank_results import weights

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
    (folder / "config.json").write_text(json.dumps(PRESETS["qwen3-4B"].config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_projections_become_fp8_within_half_a_step_and_all_else_stays_bit_for_bit(plain: Path, tmp_path: Path) -> None:
    form = to_fp8(plain, tmp_path / "fp8", file_bytes=50_000)
    assert form.weights == IN_FP8
    assert QuantizedForm.of(tmp_path / "fp8") == form
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
    assert QuantizedForm.of(plain) is None
    (plain / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(ConfigError, match=f"quantization_config has {said}. headrace gives engines bfloat16, FP8"):
        QuantizedForm.of(plain)


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


QUANTIZED = ("llama", "mistral", "smollm3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5")
QUANTIZED += ("qwen3_5_moe", "glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k2", "olmo3", "minimax_m2")
QUANTIZED += ("gemma3_text", "gemma3")
WIDE: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}
"""A block of FP8."""


@pytest.mark.parametrize("family", QUANTIZED)
def test_what_is_read_of_a_familys_fp8_folder_leaves_as_it_came(family: str, tmp_path: Path) -> None:
    """So the trainer begins with the numbers that the engines serve."""
    make_tiny(tmp_path / "plain", family, num_layers=2, **WIDE)
    form = to_fp8(tmp_path / "plain", tmp_path / "fp8")
    a = read_architecture(tmp_path / "fp8")
    source, written = HfFolder(tmp_path / "fp8", a), weights(tmp_path / "fp8")
    check_names(source, a)
    wide = {tensor.name for tensor in table(a).tensors() if tensor.shape[-1] % 128 == 0}
    assert form.weights >= {name for name in wide if name.endswith(("_proj.weight", ".w1.weight", ".w3.weight"))}
    for name, sent in quantized(form, ((name, source.tensor(name)) for name in sorted(form.weights))):
        assert torch.equal(sent.float(), written[name].float()), name


WITH_MTP = {
    "qwen3_next": "mtp.layers.0",
    "qwen3_5": "mtp.layers.0",
    "qwen3_5_moe": "mtp.layers.0",
    "glm4_moe": "model.layers.2",
    "glm4_moe_lite": "model.layers.2",
    "deepseek_v3": "model.layers.2",
}


@pytest.mark.parametrize("family", WITH_MTP)
def test_layers_that_predict_further_tokens_are_exported_as_they_came(family: str, tmp_path: Path) -> None:
    behind: dict[str, Any] = {} if WITH_MTP[family].startswith("mtp") else {"num_nextn_predict_layers": 1}
    make_tiny(tmp_path, family, **behind)
    add_mtp_layer(tmp_path, WITH_MTP[family])
    a = read_architecture(tmp_path)
    check_names(HfFolder(tmp_path, a), a)
    (tmp_path / "draft").mkdir()
    files, _ = write_passthrough_layers(tmp_path, tmp_path / "draft", "float32", 1 << 30, is_quantized=False)
    layer = load_file(tmp_path / "mtp.safetensors")
    assert layer.keys() <= files.keys()
    kept = load_file(tmp_path / "draft" / "model-kept-00001.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in layer.items())


def test_a_publication_in_fp8_has_them_in_fp8_so_that_engines_draft_with_them(tmp_path: Path) -> None:
    name = "mtp.layers.0.mlp.experts.0.up_proj.weight"
    make_tiny(tmp_path / "plain", "qwen3_next")
    add_mtp_layer(tmp_path / "plain", "mtp.layers.0")
    layer = load_file(tmp_path / "plain" / "mtp.safetensors") | {name: torch.randn(128, 128)}
    save_file(layer, tmp_path / "plain" / "mtp.safetensors")
    to_fp8(tmp_path / "plain", tmp_path / "fp8")
    published = {n: tensor for n, tensor in weights(tmp_path / "fp8").items() if n.startswith("mtp.")}
    assert published[name].dtype == torch.float8_e4m3fn
    (tmp_path / "draft").mkdir()
    write_passthrough_layers(tmp_path / "fp8", tmp_path / "draft", "bfloat16", 1 << 30, is_quantized=True)
    kept = load_file(tmp_path / "draft" / "model-kept-00001.safetensors")
    assert kept.keys() == published.keys() == layer.keys() | {f"{name}_scale_inv"}
    assert all(kept[n].dtype == tensor.dtype for n, tensor in published.items())
    assert all(kept[n].float().equal(tensor.float()) for n, tensor in published.items())


GROUP = 32
EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"
ODD = "model.layers.1.mlp.experts.0.up_proj.weight"
NORM = "model.norm.weight"
PACKED = {EXPERT: (128, 256), ODD: (3, 72)}
WEIGHTS = {"num_bits": 4, "group_size": GROUP, "strategy": "group", "symmetric": True, "type": "int", "actorder": None}


def quantization(**changed: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | changed, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Packed by compressed-tensors itself."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {NORM: torch.randn(64)}
    for name, (rows, columns) in PACKED.items():
        tensors[f"{name}_packed"] = pack_to_int32(values_of(name), 4).contiguous()
        tensors[f"{name}_scale"] = torch.randn(rows, -(-columns // GROUP)).bfloat16()
        tensors[f"{name}_shape"] = torch.tensor([rows, columns])
    save_file(tensors, folder / "model.safetensors")
    config = {**PRESETS["kimi-k2"].config, "quantization_config": quantization()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def values_of(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(-8, 8, PACKED[name], generator=generator, dtype=torch.int8)


def expected(packed: Path, name: str) -> torch.Tensor:
    scale = load_file(packed / "model.safetensors")[f"{name}_scale"].float()
    values = values_of(name).float()
    return torch.stack([values[:, n] * scale[:, n // GROUP] for n in range(values.shape[1])], dim=1)


def test_what_compressed_tensors_packs_is_read_exactly(packed: Path) -> None:
    folder = HfFolder(packed)
    assert folder.names == {NORM, EXPERT, ODD}
    for name, shape in PACKED.items():
        assert folder.shape(name) == shape
        assert folder.tensor(name).equal(expected(packed, name))


def test_it_is_written_in_bfloat16_or_in_fp8(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["to_plain", str(packed), str(tmp_path / "plain")])
    assert program.main() == 0
    assert "3 tensors in bfloat16" in capsys.readouterr().out
    plain = HfFolder(tmp_path / "plain")
    assert plain.tensor(EXPERT).equal(expected(packed, EXPERT).bfloat16())
    assert plain.tensor(NORM).dtype == torch.float32
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert to_fp8(packed, tmp_path / "fp8").weights == {EXPERT}
    exact = expected(packed, EXPERT)
    assert ((HfFolder(tmp_path / "fp8").tensor(EXPERT) - exact).abs() <= exact.abs() / 16 + 0.01).all()
    assert program.main() == 2
    with pytest.raises(AlreadyExists, match="exists already"):
        to_plain(packed, tmp_path / "plain")


def filled(folder: Path, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The folder holds one expert with these values in INT4, and a norm."""
    rows, columns = values.shape
    generator = torch.Generator().manual_seed(5)
    scale = (torch.rand((rows, columns // GROUP), generator=generator) + 0.01).bfloat16()
    parts = {"_packed": pack_to_int32(values, 4), "_scale": scale, "_shape": torch.tensor(values.shape).int()}
    tensors = {EXPERT + end: part.contiguous() for end, part in parts.items()}
    save_file(tensors | {NORM: torch.randn(64).bfloat16()}, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [-8, -7])
def test_int4_that_is_read_is_written_in_the_same_bits(packed: Path, dtype: torch.dtype, lowest: int) -> None:
    values = torch.randint(lowest, 8, (256, 512), dtype=torch.int8, generator=torch.Generator().manual_seed(4))
    values[:, ::GROUP] = lowest  # a group's factor is that which its largest weight asks for
    values[:, 1::GROUP] = 1
    published = filled(packed, values)
    form = QuantizedForm.of(packed)
    assert form == QuantizedForm(frozenset({EXPERT}), (1, GROUP), num_tensors=2, bits=4)
    assert str(form) == "INT4"
    weights = {name: HfFolder(packed).tensor(name).to(dtype) for name in (EXPERT, NORM)}
    written = dict(quantized(form, iter(weights.items())))
    assert written.keys() == published.keys() | {NORM}
    for name, tensor in published.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].equal(tensor), name
    specs = quantized_specs(form, [TensorSpec(name, tensor.shape, "bfloat16") for name, tensor in weights.items()])
    assert [(spec.name, list(spec.shape)) for spec in specs] == [(n, list(t.shape)) for n, t in written.items()]
    assert sum(spec.num_bytes for spec in specs[:3]) == sum(tensor.nbytes for tensor in published.values())
    sums = EngineChecksums()
    sums.update(written.items())
    assert list(sums.result()) == [NORM], "engines repack INT4"


def test_trained_weights_become_int4_as_compressed_tensors_would_write_them(packed: Path) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    weight[0, :GROUP] = 0
    filled(packed, torch.zeros(64, 256, dtype=torch.int8))
    form = QuantizedForm.of(packed)
    assert form is not None
    written = dict(quantized(form, iter([(EXPERT, weight)])))
    groups = weight.view(64, -1, GROUP)
    theirs = QuantizationArgs(**WEIGHTS)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), theirs)
    scale = scale.bfloat16()
    scale[0, 0] = 1
    assert written[f"{EXPERT}_scale"].equal(scale)
    expected = quantize(weight, scale.float(), torch.zeros_like(scale, dtype=torch.int8), theirs)
    assert written[f"{EXPERT}_packed"].equal(pack_to_int32(expected.to(torch.int8), 4))
    again = unpacked_int4(written[f"{EXPERT}_packed"], written[f"{EXPERT}_scale"], (64, 256), GROUP)
    assert [t.tolist() for _, t in quantized(form, iter([(EXPERT, again)]))] == [t.tolist() for t in written.values()]


def test_weights_that_are_not_finite_are_refused(packed: Path) -> None:
    filled(packed, torch.zeros(2, 64, dtype=torch.int8))
    form = QuantizedForm.of(packed)
    assert form is not None
    with pytest.raises(InvalidArgument, match="INT4 knows none"):
        dict(quantized(form, iter([(EXPERT, torch.full((2, 64), torch.nan))])))


def test_engines_take_int4_of_experts_alone(packed: Path) -> None:
    parts = filled(packed, torch.ones(2, 64, dtype=torch.int8))
    shared = {name.replace("experts.0", "shared_experts"): part for name, part in parts.items()}
    save_file(shared, packed / "model.safetensors")
    with pytest.raises(ConfigError, match=r"shared_experts.*to_plain MODEL FOLDER .bfloat16., or python -m .*to_fp8"):
        QuantizedForm.of(packed)


def test_check_says_what_a_publication_in_int4_costs_and_refuses_a_delta(
    job_file: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    filled(model, torch.ones(1000, 1280, dtype=torch.int8))
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantization()}))
    assert main(["check", str(job_file), "--fast"]) == 2
    assert "is in INT4, in which SGLang computes only on a GPU" in " ".join("".join(capsys.readouterr()).split())
    assert main(["check", str(job_file), "--fast", "--elsewhere", "--bf16"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "engines serve INT4: 1 of 2 tensors, 0.7 MB a publication" in printed
    delta = ("--update-weight-delta", "--update-weight-transport", "disk")
    assert main(["check", str(job_file), "--fast", "--elsewhere", "--bf16", *delta]) == 2
    assert "--no-update-weight-delta" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (quantization(num_bits=8), "has num_bits 8. headrace reads pack-quantized INT4"),
        (quantization() | {"format": "marlin-24"}, "format 'marlin-24'"),
        (quantization(group_size=64), r"factors of shape \[128, 8\]; groups of 64 need \[128, 32\] and \[128, 4\]"),
    ],
)
def test_another_packing_is_refused(packed: Path, config: dict[str, Any], message: str) -> None:
    (packed / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ConfigError, match=message):
        HfFolder(packed).tensor(EXPERT)
