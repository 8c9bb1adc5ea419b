"""Gemma 3: the published names and shapes, both forms of its config.json, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import ConfigError
from headrace.job.megatron import MegatronArgs
from headrace.job.model import contradictions
from headrace.models.architecture import LinearRope, Windows
from headrace.models.registry import PRESETS, architecture, table
from services.trainer.megatron.gpt import scale_embeddings

SIZES = {
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
}
TEXT, WITH_TOWER = (dict(PRESETS[name].config) for name in ("gemma-3-1b", "gemma-3-27b"))


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_the_tensors_of_transformers_and_the_published_size(name: str) -> None:
    """Beside a vision tower, transformers gives the decoder another name than the published files."""
    config = dict(PRESETS[name].config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    counted, beside = table(architecture(config)), "model.language_model."
    decoder = {n: p for n, p in model.named_parameters() if "text_config" not in config or n.startswith(beside)}
    theirs = {n.replace(beside, "language_model.model."): tuple(p.shape) for n, p in decoder.items()}
    assert {tensor.name: tensor.shape for tensor in counted.tensors()} == theirs
    assert counted.num_parameters == SIZES[name]


@pytest.mark.parametrize("config", [TEXT, WITH_TOWER])
def test_a_config_that_transformers_writes_again_says_the_same(config: dict[str, Any]) -> None:
    written = AutoConfig.for_model(**config).to_dict()
    assert written.get("text_config", written).keys() >= {"rope_parameters", "layer_types"}
    assert architecture(written) == architecture(config)


def test_a_model_of_text_has_what_its_layers_need() -> None:
    a = architecture(TEXT)
    assert a.windows == Windows(512, tuple(n for n in range(26) if n % 6 != 5), 10000.0)
    assert (a.rotary_base, a.rope_scaling, a.softmax_scale) == (1000000.0, None, 1 / 16)
    assert not a.untie_embeddings_and_output_weights
    assert a.kept == ()


def test_a_model_beside_a_tower_is_stretched_and_keeps_the_tower() -> None:
    a = architecture(WITH_TOWER)
    assert a.rope_scaling == LinearRope(8.0)
    assert a.softmax_scale == pytest.approx(1 / math.sqrt(168))
    assert a.kept == ("vision_tower.", "multi_modal_projector.")
    plain = architecture({**WITH_TOWER, "text_config": WITH_TOWER["text_config"] | {"rope_scaling": None}})
    assert plain == replace(a, rope_scaling=None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling of type 'yarn' is not supported"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}, "full_attention": {"rope_theta": 1}}},
            "rope_type 'linear' of sliding_attention",
        ),
    ],
)
def test_what_is_not_published_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        architecture(TEXT | changed)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("gemma2", "softcapping"), ("gemma3n", "embeddings of their own"), ("gemma4", "one for all layers")],
)
def test_other_gemmas_are_refused_with_the_reason(model_type: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{why}.*the nearest that it trains: gemma3"):
        architecture({"model_type": model_type})


def test_flags_of_a_launch_script_agree_with_the_checkpoint_where_they_say_the_same() -> None:
    flags: dict[str, object] = {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "window_size": (511, 0),
        "window_attn_skip_freq": 6,
        "softmax_scale": 0.0625,
        "untie_embeddings_and_output_weights": False,
    }
    assert contradictions(architecture(TEXT), MegatronArgs.model_validate(flags)) == []
    (wrong,) = contradictions(architecture(TEXT), MegatronArgs.model_validate(flags | {"swiglu": True}))
    assert wrong.startswith("--swiglu True contradicts the checkpoint")


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 34.0), (torch.float32, 1152**0.5)])
def test_embeddings_are_scaled_by_a_number_of_their_own_type(dtype: torch.dtype, scale: float) -> None:
    """As transformers does: √1152 is 33.94, and bfloat16 has 34 next to it."""
    scaled = scale_embeddings(torch.nn.Identity(), (), torch.ones(1, 1152, dtype=dtype))
    assert scaled.dtype == dtype
    assert scaled[0, 0].item() == pytest.approx(scale, rel=1e-7)
