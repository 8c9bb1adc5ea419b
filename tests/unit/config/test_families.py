"""Families as data: every table is whole, presets have the size that was published, unknown routing is refused."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.models.registry import FAMILIES, PRESETS, architecture, table

DEEPSEEK = dict(PRESETS["deepseek-v3"].config)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    preset = PRESETS[name]
    counted = table(architecture(preset.config)).num_parameters
    assert counted == pytest.approx(preset.published_parameters, rel=0.015)


@pytest.mark.parametrize("name", PRESETS)
def test_no_two_rows_have_a_tensor_in_common(name: str) -> None:
    tensors = [tensor.name for tensor in table(architecture(PRESETS[name].config)).tensors()]
    assert len(set(tensors)) == len(tensors)


def test_a_model_type_belongs_to_one_family() -> None:
    types = [name for family in FAMILIES for name in family.model_types]
    assert len(set(types)) == len(types)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob false with sigmoid scores"),
        ({"topk_group": 2}, "ranks groups by their two best experts, Megatron-core by their 4 best"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({"rope_interleave": False}, "rope_interleave false is not what Megatron-core computes"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of type 'linear' is not supported"),
    ],
)
def test_routing_and_attention_that_megatron_does_not_compute_are_refused(
    changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture(DEEPSEEK | changed)
