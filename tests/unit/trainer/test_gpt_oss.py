"""gpt-oss: the published names and shapes, MXFP4 bit for bit as transformers reads it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.errors import ConfigError
from headrace.job.megatron import MegatronArgs
from headrace.job.model import check_layout, contradictions
from headrace.models.family import TransposedGateUp
from headrace.models.folders import QuantizedForm
from headrace.models.registry import PRESETS, architecture, table
from headrace.models.torch_dist import rows_of
from services.trainer.hugging_face.hf_folder import HfFolder, check_names
from services.trainer.hugging_face.rewrite.to_plain import to_plain
from services.trainer.hugging_face.shards import cut, merge
from services.trainer.hugging_face.torch_dist import TorchDistFolder, write_torch_dist
from tests.support.models.tiny_families import tiny_config

SIZES = {"gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672}
CONFIG = dict(PRESETS["gpt-oss-20b"].config)
EXPERTS = re.compile(r"experts\.(gate_up|down)_proj$")
WIDTHS = {"gate_up": (64, 2 * 96), "down": (96, 64)}
"""in × out of the tiny model"""


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_the_tensors_of_transformers_and_of_the_published_index(name: str, tmp_path: Path) -> None:
    config = dict(PRESETS[name].config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    counted = table(architecture(config))
    assert {tensor.name: tensor.shape for tensor in counted.tensors()} == theirs
    assert counted.num_parameters == SIZES[name]
    published = [
        written
        for name in theirs
        for written in ([f"{name}_blocks", f"{name}_scales"] if EXPERTS.search(name) else [name])
    ]
    index = {"weight_map": dict.fromkeys(published, "model-00000-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_names(HfFolder(tmp_path), architecture(config))


def quantized(projection: str) -> dict[str, Tensor]:
    """Every four bits, and exponents from the smallest to the largest that keep all values finite in bfloat16."""
    rows, outputs = WIDTHS[projection]
    return {
        "blocks": torch.randint(0, 256, (4, outputs, rows // 32, 16), dtype=torch.uint8),
        "scales": torch.randint(0, 252, (4, outputs, rows // 32), dtype=torch.uint8),
    }


@pytest.fixture
def mxfp4(tmp_path: Path) -> Path:
    """A tiny model with experts in MXFP4, as gpt-oss is published."""
    torch.manual_seed(0)
    folder = tmp_path / "model"
    folder.mkdir()
    config = tiny_config("gpt_oss")
    tensors: dict[str, Tensor] = {}
    for tensor in table(architecture(config)).tensors():
        if found := EXPERTS.search(tensor.name):
            tensors |= {f"{tensor.name}_{end}": values for end, values in quantized(found[1]).items()}
        else:
            tensors[tensor.name] = torch.randn(tensor.shape).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return folder


def test_mxfp4_is_read_bit_for_bit_as_transformers_reads_it(mxfp4: Path, tmp_path: Path) -> None:
    source, a = HfFolder(mxfp4), architecture(tiny_config("gpt_oss"))
    check_names(source, a)
    to_plain(mxfp4, tmp_path / "plain")
    packed = load_file(mxfp4 / "model.safetensors")
    plain = HfFolder(tmp_path / "plain")
    assert plain.names == source.names
    for name, (rows, outputs) in ((f"model.layers.0.mlp.experts.{p}_proj", size) for p, size in WIDTHS.items()):
        parts = packed[f"{name}_blocks"], packed[f"{name}_scales"]
        assert source.shape(name) == (4, rows, outputs)
        for dtype in (torch.bfloat16, torch.float32):
            expected = convert_moe_packed_tensors(*parts, dtype=dtype)
            assert source.tensor(name).to(dtype).equal(expected)
            assert source.tensor(name, 3).to(dtype).equal(expected[3])
        assert plain.tensor(name).equal(convert_moe_packed_tensors(*parts))
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert QuantizedForm.of(tmp_path / "plain") is None
    with pytest.raises(ConfigError, match=r"in MXFP4, in which engines cannot be given .*to_plain MODEL FOLDER"):
        QuantizedForm.of(mxfp4)


def test_a_megatron_checkpoint_gives_back_the_tensors_that_it_was_written_from(mxfp4: Path, tmp_path: Path) -> None:
    source, a = HfFolder(mxfp4), architecture(tiny_config("gpt_oss"))
    rows = [row for row, _ in rows_of(a)]
    write_torch_dist(
        tmp_path / "megatron",
        a,
        {row.hf[0].key: cut(row.sharding, source.parts(row), 0, 1).contiguous() for row in rows},
    )
    written = TorchDistFolder(tmp_path / "megatron", a)
    for row in rows:
        assert all(one.equal(other) for one, other in zip(written.parts(row), source.parts(row), strict=True)), row


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a_blocks": torch.zeros(4, 2, 1, 16, dtype=torch.uint8)}, "a_blocks is there without a_scales"),
        (
            {"a_blocks": torch.zeros(4, 2, 1, 16, dtype=torch.uint8), "a_scales": torch.zeros(4, 2, dtype=torch.uint8)},
            r"scales of torch.uint8 and shape \[4, 2\]",
        ),
    ],
)
def test_blocks_without_their_scales_are_refused(tmp_path: Path, tensors: dict[str, Tensor], said: str) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=said):
        HfFolder(tmp_path).tensor("a")


def test_gate_and_up_in_turns_become_a_half_each_and_go_back() -> None:
    whole = torch.randn(3, 8)
    shards = [cut(TransposedGateUp(), [whole], rank, 2) for rank in range(2)]
    assert torch.cat([shard[:2] for shard in shards]).equal(whole[:, ::2].t())
    assert merge(TransposedGateUp(), shards)[0].equal(whole)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_bias": False}, "attention_bias False is not what Megatron-core computes"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
        ({"rope_scaling": CONFIG["rope_scaling"] | {"attention_factor": 1.2}}, "attention_factor 1.2"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of type 'linear'"),
    ],
)
def test_what_megatron_does_not_compute_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        architecture(CONFIG | changed)


def test_an_expert_is_not_divided_because_it_has_biases() -> None:
    a, layout = architecture(CONFIG), {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(
        ConfigError, match="2 tensor ranks in each expert: .* pass --expert-tensor-parallel-size 1 with"
    ):
        check_layout(a, MegatronArgs.model_validate(layout))
    check_layout(
        a, MegatronArgs.model_validate(layout | {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2})
    )


def test_flags_of_a_launch_script_agree_with_the_checkpoint_where_they_say_the_same() -> None:
    flags = {"window_size": (127, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable", "glu_linear_offset": 1.0}
    more = {"activation_func_clamp_value": 7.0, "add_bias_linear": True, "swiglu": True}
    a = architecture(CONFIG)
    assert contradictions(a, MegatronArgs.model_validate(flags | more)) == []
    [wrong] = contradictions(a, MegatronArgs.model_validate({"disable_bias_linear": True}))
    assert wrong.startswith("--disable-bias-linear True contradicts the checkpoint")
