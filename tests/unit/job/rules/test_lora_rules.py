"""LoRA's options: what they need, what they exclude, and which layers of which models they may name."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from headrace.errors import ConfigError
from headrace.job.megatron import megatron
from headrace.job.model import adapted_layers, check_adapters, check_served_adapters, last_word
from headrace.models.registry import architecture
from tests.support.models.tiny_families import tiny_config

DENSE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
LATENT = {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


def test_defaults_are_pefts_on_every_linear_layer(load_with) -> None:
    lora = load_with("--lora-rank", "16", "--lora-target-modules", "q_proj", "v_proj").lora
    assert (lora.lora_rank, lora.lora_target_modules) == (16, ("q_proj", "v_proj"))
    lora = load_with("--lora-rank", "16").lora
    assert (lora.lora_alpha, lora.lora_dropout, lora.lora_init, lora.lora_load) == (8.0, 0.0, "kaiming", None)
    assert lora.lora_target_modules == ("all-linear",)
    assert load_with().lora.lora_rank is None


@pytest.mark.parametrize(
    ("family", "wanted", "found"),
    [
        ("qwen3", ("all-linear",), DENSE),
        ("llama", ("q_proj", "up_proj"), {"q_proj", "up_proj"}),
        ("glm4", ("all-linear",), DENSE - {"gate_proj", "up_proj"} | {"gate_up_proj"}),
        ("qwen3_moe", ("q_proj", "o_proj"), {"q_proj", "o_proj"}),
        ("qwen3_moe", ("all-linear",), DENSE),
        ("deepseek_v3", ("all-linear",), {*LATENT, "q_a_proj", "q_b_proj", "gate_proj", "up_proj", "down_proj"}),
        ("moonlight", ("q_proj", "kv_b_proj"), {"q_proj", "kv_b_proj"}),
        ("qwen3_next", ("in_proj_qkvz", "out_proj"), {"in_proj_qkvz", "out_proj"}),
        ("nemotron_h", ("all-linear",), DENSE - {"gate_proj"} | {"in_proj", "out_proj"}),
        ("gpt_oss", ("all-linear",), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("gpt_oss", ("q_proj", "down_proj"), {"q_proj", "down_proj"}),
    ],
)
def test_layers_are_named_as_peft_names_them(family: str, wanted: tuple[str, ...], found: set[str]) -> None:
    assert {last_word(each.name) for each in adapted_layers(architecture(tiny_config(family)), wanted)} == found


@pytest.mark.parametrize(
    ("family", "wanted", "said"),
    [
        (
            "qwen3",
            ("lm_head",),
            "lora_target_modules lm_head is not a linear layer of this model: choose from down_proj",
        ),
        ("qwen3", ("q_norm",), "q_norm is not a linear layer"),
        ("qwen3_moe", ("gate",), "gate is not a linear layer"),
        ("deepseek_v3", ("q_proj",), "q_proj is not a linear layer"),
        ("gpt_oss", ("gate_proj",), "gate_proj is not a linear layer of this model: choose from down_proj"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused(family: str, wanted: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adapted_layers(architecture(tiny_config(family)), wanted)


TP4, EP2 = {"tensor_model_parallel_size": 4}, {"expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (TP4 | EP2 | {"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size 2 .* must be 1 or .* 4"),
        ({"use_transformer_engine_op_fuser": True}, "use_transformer_engine_op_fuser"),
        (TP4 | EP2, None),
        (TP4 | EP2 | {"expert_tensor_parallel_size": 1}, None),
    ],
)
def test_layouts_that_cannot_train_adapters_of_experts_are_refused(given: dict[str, int], said: str | None) -> None:
    experts = architecture(tiny_config("qwen3_moe"))
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_adapters(experts, megatron(given), ("all-linear",))


@pytest.mark.parametrize(
    ("family", "wanted", "is_served"),
    [
        ("qwen3", ("all-linear",), True),
        ("gemma3_text", ("all-linear",), True),
        ("gemma3", ("q_proj",), False),
        ("qwen3_moe", ("q_proj", "o_proj"), True),
        ("qwen3_moe", ("all-linear",), False),
        ("deepseek_v3", ("q_a_proj",), False),
    ],
)
def test_adapters_that_engines_load_beside_their_weights(family: str, wanted: tuple[str, ...], is_served: bool) -> None:
    with nullcontext() if is_served else pytest.raises(ConfigError, match="lora-target-modules|not been tried"):
        check_served_adapters(architecture(tiny_config(family)), wanted)


@pytest.mark.parametrize(
    ("words", "said"), [((), "lora_rank"), (("--lora-rank", "8", "--colocate", "true"), "colocate")]
)
def test_what_adapters_alone_cannot_be_published_with_is_refused(load_with, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_with("--update-weight-transport", "adapter", *words)


def test_adapters_that_engines_do_not_serve_are_refused_by_name(load_with) -> None:
    with pytest.raises(ConfigError, match="SGLang .* refuses DoRA"):
        load_with("--lora-rank", "16", "--lora-use-dora")
