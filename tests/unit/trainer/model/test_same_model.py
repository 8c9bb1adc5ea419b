"""A checkpoint of the same model resumes, also one of a release that knew fewer architectures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import DataLoss
from headrace.models.registry import PRESETS, architecture
from services.trainer.model.policy import model_facts, require_same_model

NEW = ("windows", "attention_sinks", "add_bias_linear", "swiglu_limit", "attention_output_gate", "linear_attention")
NEW += ("mlp_layers", "squared_relu")


def facts(name: str) -> dict[str, Any]:
    return model_facts(architecture(PRESETS[name].config), None)


def reader(saved: dict[str, Any]) -> Any:
    return SimpleNamespace(scalars={"model": saved})


@pytest.mark.parametrize("name", ["qwen3-4B", "deepseek-v3", "glm-4.5-Air"])
def test_facts_that_an_earlier_release_did_not_know_are_no_difference(name: str) -> None:
    saved = {fact: value for fact, value in facts(name).items() if fact not in (*NEW, "kept")} | {"num_mtp_layers": 1}
    if saved["rope_scaling"]:
        del saved["rope_scaling"]["has_exact_range"]
    require_same_model(reader(saved), facts(name))


@pytest.mark.parametrize("fact", ["windows", "attention_sinks", "swiglu_limit"])
def test_facts_that_only_one_of_them_has_are_a_difference(fact: str) -> None:
    own = facts("gpt-oss-20b")
    saved = {name: value for name, value in own.items() if name != fact}
    for one, other in ((saved, own), (own, saved)):
        with pytest.raises(DataLoss, match=f"is of another model: {fact} "):
            require_same_model(reader(one), other)
