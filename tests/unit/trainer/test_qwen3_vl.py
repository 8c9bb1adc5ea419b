"""Qwen3-VL: the published names, shapes and sizes, and both forms of its config.json."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from headrace.models.registry import PRESETS, architecture, table

PUBLISHED = {
    "qwen3-vl-2B": (625, 2_127_532_032),
    "qwen3-vl-4B": (713, 4_437_815_808),
    "qwen3-vl-8B": (750, 8_767_123_696),
    "qwen3-vl-32B": (1058, 33_357_390_064),
}
"""Tensors and parameters of the whole model, as its index counts them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_tensors_of_transformers_and_the_published_size(name: str) -> None:
    config = dict(PRESETS[name].config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    a = architecture(config)
    theirs = {each: tuple(parameter.shape) for each, parameter in model.named_parameters()}
    assert (len(theirs), model.num_parameters()) == PUBLISHED[name]
    trained = {each: shape for each, shape in theirs.items() if not each.startswith(tuple(a.kept))}
    assert {tensor.name: tensor.shape for tensor in table(a).tensors()} == trained


@pytest.mark.parametrize("name", ["qwen3-vl-2B", "qwen3-vl-8B"])  # with a tied head, and with one of its own
def test_a_config_that_transformers_writes_again_says_the_same(name: str) -> None:
    config = dict(PRESETS[name].config)
    written = AutoConfig.for_model(**config).to_dict()
    assert written["text_config"].keys() >= {"rope_parameters"}
    assert architecture(written) == architecture(config)


def test_the_axes_of_rotary_frequencies_take_turns() -> None:
    vision = architecture(PRESETS["qwen3-vl-2B"].config).vision
    assert vision is not None
    assert vision.rotary_axes == (0, 1, 2) * 20 + (0,) * 4
    assert (vision.patch_values, vision.merge_size, vision.deepstack) == (1536, 2, 3)
