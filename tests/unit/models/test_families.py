"""Families as data: every table is whole, presets have the size that was published, unknown routing is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.job.megatron import MegatronArgs
from headrace.job.model import check_layout, contradictions
from headrace.job.schema.job import Job
from headrace.models.registry import PRESETS, architecture, table
from headrace.models.tokenizer.tokenizer import end_tokens

DEEPSEEK = dict(PRESETS["deepseek-v3"].config)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    preset = PRESETS[name]
    counted = table(architecture(preset.config))
    assert counted.num_parameters == pytest.approx(preset.published_parameters, rel=0.015)
    tensors = [tensor.name for tensor in counted.tensors()]
    assert len(set(tensors)) == len(tensors)


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_layout_divides_the_model_and_fits_80_gigabytes(name: str) -> None:
    """Weights in bfloat16 and gradients in float32 take 6 bytes, and Adam's numbers 12.

    Adam's numbers of everything but experts are held once for all expert ranks, because those are data ranks.
    """
    preset = PRESETS[name]
    a = architecture(preset.config)
    tensor, stages, experts = (
        preset.layout.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline", "expert")
    )
    of_last = preset.layout.get("num_layers_in_last_pipeline_stage")
    assert a.num_layers % stages == 0 if of_last is None else (a.num_layers - of_last) % (stages - 1) == 0
    assert all(size % tensor == 0 for size in (a.num_attention_heads, a.num_query_groups, a.vocab_size))
    layers = -(-a.num_layers // stages)
    rows = [row for layer in range(a.num_layers - layers, a.num_layers) for row in table(a).layer(layer)]
    of_experts = sum(math.prod(t.shape) for row in rows if row.expert is not None for t in row.hf)
    shared = sum(math.prod(t.shape) for row in rows if row.expert is None for t in row.hf)
    assert a.experts is None or (tensor == 1 and a.experts.count % experts == 0)
    dense = (shared + a.vocab_size * a.hidden_size) / tensor
    assert 18 * of_experts / experts + (6 + 12 / experts) * dense < 65e9


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (
            "qwen3_mo",
            r"'qwen3_mo' is not supported: headrace has no family for it; the nearest that it trains: qwen3_moe",
        ),
        (
            "kimi_linear",
            "a decay for each channel, which is not built; the nearest that it trains: qwen3_next, kimi_k2",
        ),
        ("zzz", r"'zzz' is not supported: headrace has no family for it. Supported: llama, mistral"),
        (["llama"], r"it has no model_type .found \['llama'\]"),
    ],
)
def test_an_unsupported_model_type_is_told_why_and_what_comes_nearest(model_type: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture({"model_type": model_type})


@pytest.mark.parametrize(
    ("model_type", "nearest"), [("deepseek_v32", "deepseek_v3"), ("glm_moe_dsa", "glm4_moe, glm4_moe_lite")]
)
def test_check_refuses_sparse_attention_by_name(
    model: Path, job_file: Path, capsys: pytest.CaptureFixture[str], model_type: str, nearest: str
) -> None:
    (model / "config.json").write_text(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    assert main(["check", str(job_file), "--fast"]) == 2
    refused = " ".join("".join(capsys.readouterr()).split())
    assert f"model_type '{model_type}' is not supported: an indexer chooses the keys" in refused
    assert f"the nearest that it trains: {nearest}." in refused


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("mistral-7B-v0.3", {"sliding_window": 4096}, "sliding_window 4096 below max_position_embeddings 32768"),
        ("qwen3-8B", {"layer_types": ["full_attention", "sliding_attention"]}, "layer 1 is 'sliding_attention'"),
        ("smollm3-3B", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling of type 'yarn' is not supported"),
    ],
)
def test_attention_within_a_window_is_refused(name: str, changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture(dict(PRESETS[name].config) | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob false with sigmoid scores"),
        ({"topk_group": 2}, "ranks groups by their two best experts, Megatron-core by their 4 best"),
        ({"rope_interleave": False}, "rope_interleave false is not what Megatron-core computes"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of type 'linear' is not supported"),
    ],
)
def test_routing_and_attention_that_megatron_does_not_compute_are_refused(
    changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture(DEEPSEEK | changed)


def test_a_name_brings_its_layout_and_the_jobs_own_sizes_win(load_with: Callable[..., Job], model: Path) -> None:
    (model / "config.json").write_text(json.dumps(PRESETS["qwen3-4B"].config))
    flags = ("--model", "qwen3-4B", "--actor-num-gpus-per-node", "4")
    assert load_with(*flags).megatron["tensor_model_parallel_size"] == 2
    own = load_with(*flags, "--tensor-model-parallel-size", "4")
    assert own.megatron["tensor_model_parallel_size"] == 4


def test_a_command_line_for_megatron_agrees_with_the_checkpoint_where_it_says_the_same() -> None:
    kimi = architecture(PRESETS["kimi-k2"].config)
    flags: dict[str, object] = {"num_layers": 61, "num_moe_experts": 384, "moe_router_topk": 8, "q_lora_rank": 1536}
    without_effect = {"kv_channels": 64, "moe_router_num_groups": 1, "moe_router_pre_softmax": True}
    assert contradictions(kimi, MegatronArgs.model_validate(flags | without_effect)) == []
    wrong = contradictions(kimi, MegatronArgs.model_validate(flags | {"moe_router_num_groups": 8}))
    assert wrong == [
        "--moe-router-num-groups 8 contradicts the checkpoint, whose config.json says None: leave the flag out"
    ]


def test_a_command_line_of_slimes_agrees_with_a_model_of_linear_attention() -> None:
    flags: dict[str, object] = {
        "spec": ("slime_plugins.models.qwen3_5", "get_qwen3_5_spec"),
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "rotary_percent": 0.25,
        "linear_attention_freq": 4,
        "linear_num_value_heads": 32,
    }
    moe = architecture(PRESETS["qwen3.5-35B-A3B"].config)
    assert contradictions(moe, MegatronArgs.model_validate(flags)) == []
    (wrong,) = contradictions(moe, MegatronArgs.model_validate(flags | {"linear_attention_freq": 3}))
    assert wrong.startswith("--linear-attention-freq 3 contradicts the checkpoint")


def test_tensor_ranks_divide_the_heads_of_linear_attention() -> None:
    args = MegatronArgs.model_validate({"tensor_model_parallel_size": 4})
    config = PRESETS["qwen3.5-27B"].config
    text = {**config["text_config"], "linear_num_key_heads": 6}
    with pytest.raises(ConfigError, match="4 does not divide linear_num_key_heads 6"):
        check_layout(architecture({**config, "text_config": text}), args)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (None, None, set()),
        ("{}", '{"eos_token_id": null}', set()),
        ('{"eos_token_id": 2}', None, {2}),
        ('{"eos_token_id": 2}', '{"eos_token_id": [2, 7]}', {2, 7}),
    ],
)
def test_both_files_name_them(tmp_path: Path, config: str | None, generation: str | None, ids: set[int]) -> None:
    for name, text in (("config.json", config), ("generation_config.json", generation)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert end_tokens(tmp_path) == ids


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[" * 200_000,
        *(f'{{"eos_token_id": {each}}}' for each in ('"2"', "[[2]]", "true")),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_does_not_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name) as refused:
        end_tokens(tmp_path)
    assert len(refused.value.message) < 600
