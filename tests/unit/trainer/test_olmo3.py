"""Olmo 3: the published names and shapes, both forms of its config.json, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import ConfigError
from headrace.job.megatron import MegatronArgs
from headrace.job.model import contradictions
from headrace.models.architecture import Windows
from headrace.models.registry import PRESETS, architecture, table

SIZES = {"olmo-3-7B": 7_298_011_136, "olmo-3-32B": 32_233_522_176}
CONFIG = dict(PRESETS["olmo-3-7B"].config)


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_the_tensors_of_transformers_and_the_published_size(name: str) -> None:
    config = dict(PRESETS[name].config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    counted = table(architecture(config))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {tensor.name: tensor.shape for tensor in counted.tensors()} == theirs
    assert counted.num_parameters == SIZES[name]


def test_a_config_that_transformers_writes_again_says_the_same() -> None:
    written = AutoConfig.for_model(**CONFIG).to_dict()
    assert written.keys() >= {"rope_parameters"}
    assert architecture(written) == architecture(CONFIG)
    assert architecture({n: v for n, v in CONFIG.items() if n != "layer_types"}) == architecture(CONFIG)


def test_windows_have_frequencies_of_their_own() -> None:
    a = architecture(CONFIG)
    assert a.windows == Windows(4096, tuple(n for n in range(32) if n % 4 != 3), 500000.0)
    assert a.rope_scaling is not None
    before_long_contexts = architecture(CONFIG | {"rope_scaling": None, "max_position_embeddings": 8192})
    assert before_long_contexts == replace(a, rope_scaling=None, max_position_embeddings=8192)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"rope_scaling": CONFIG["rope_scaling"] | {"attention_factor": 1.0}}, "attention_factor 1.0 is not what"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of type 'linear'"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}, "full_attention": {}}},
            "rope_type 'yarn' of sliding_attention",
        ),
    ],
)
def test_what_megatron_does_not_compute_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        architecture(CONFIG | changed)


def test_flags_of_a_launch_script_agree_with_the_checkpoint_where_they_say_the_same() -> None:
    flags = {"qk_layernorm": True, "post_self_attn_layernorm": True, "window_size": (4095, 0)}
    assert contradictions(architecture(CONFIG), MegatronArgs.model_validate(flags)) == []
