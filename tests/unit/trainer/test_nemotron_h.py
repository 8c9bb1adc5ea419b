"""Nemotron-H: the published names and shapes, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, NemotronHConfig

from headrace.errors import ConfigError
from headrace.job.megatron import MegatronArgs
from headrace.job.model import check_layout
from headrace.models.registry import PRESETS, architecture, table

DENSE, MIXED = (dict(PRESETS[name].config) for name in ("nemotron-nano-9B-v2", "nemotron-3-nano-30B-A3B"))


def test_the_presets_have_the_published_sizes_and_shapes() -> None:
    assert table(architecture(MIXED)).num_parameters == 31_577_940_288
    counted = table(architecture(DENSE))
    assert counted.num_parameters == 8_888_227_328
    shapes = {tensor.name: tensor.shape for tensor in counted.tensors()}
    assert shapes["backbone.layers.0.mixer.in_proj.weight"] == (22656, 4480)
    assert shapes["backbone.layers.0.mixer.conv1d.weight"] == (12288, 1, 4)
    assert [name.split(".")[2] for name in shapes if "q_proj" in name] == ["14", "21", "30", "39"]
    assert shapes["backbone.layers.14.mixer.q_proj.weight"] == (5120, 4480)
    assert shapes["backbone.layers.14.mixer.k_proj.weight"] == (1024, 4480)
    assert shapes["backbone.layers.55.mixer.down_proj.weight"] == (4480, 15680)
    assert sum("gate" in name for name in shapes) == 0


@pytest.mark.parametrize(("config", "pattern"), [(DENSE, "M-*"), (MIXED, "ME*")])
def test_a_presets_tensors_are_those_of_transformers(config: dict[str, Any], pattern: str) -> None:
    """Of one layer of each kind: the number of parameters tells that the others are there too."""
    short = config | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(NemotronHConfig(**short)).state_dict()
    theirs = {re.sub("^model[.]", "backbone.", name): tuple(tensor.shape) for name, tensor in state.items()}
    for stack in [name for name in theirs if ".experts." in name]:
        count, *shape = theirs.pop(stack)
        layer, _, part = stack.rpartition(".")
        theirs |= {f"{layer}.{expert}.{part}.weight": tuple(shape) for expert in range(count)}
    assert {tensor.name: tensor.shape for tensor in table(architecture(short)).tensors()} == theirs


@pytest.mark.parametrize(
    "changed",
    [
        {"mlp_hidden_act": "silu"},
        {"use_bias": True},
        {"use_conv_bias": False},
        {"time_step_limit": [0.001, 0.1]},
        {"moe_latent_size": 1024},
    ],
)
def test_another_activation_bias_limit_or_size_is_refused(changed: dict[str, object]) -> None:
    (name,) = changed
    with pytest.raises(ConfigError, match=f"{name} .* is not supported; supported: "):
        architecture(MIXED | changed)


def test_layers_that_predict_further_tokens_are_kept() -> None:
    assert architecture(DENSE).kept == ()
    assert architecture(DENSE | {"num_nextn_predict_layers": 1}).kept == ("mtp.",)


def test_tensor_ranks_divide_the_groups_of_mamba_mixers() -> None:
    with pytest.raises(ConfigError, match="tensor_model_parallel_size 16 does not divide mamba_num_groups 8"):
        check_layout(
            architecture(DENSE | {"num_attention_heads": 64, "num_key_value_heads": 16}),
            MegatronArgs.model_validate({"tensor_model_parallel_size": 16}),
        )
