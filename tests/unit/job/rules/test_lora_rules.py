"""LoRA's options: what they need, what they exclude, and which layers of which models they may name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.job.model import adapted_layers, last_word
from headrace.models.registry import architecture
from headrace.preflight import CheckOptions, Prompts
from services.trainer.check import check as check_trainer
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
    ],
)
def test_layers_that_cannot_be_adapted_are_refused(family: str, wanted: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adapted_layers(architecture(tiny_config(family)), wanted)


@pytest.mark.parametrize(("gpus", "installed"), [(8, True), (8, False), (0, True)])
def test_lora_is_refused_before_a_start_where_layers_are_transformer_engines(
    load_with,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    installed: bool,
) -> None:
    job = load_with("--lora-rank", "16")
    if installed:
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("headrace.devices.num_gpus", lambda: gpus)
    report = asyncio.run(check_trainer(CheckOptions(job, elsewhere=False, fast=False), Prompts))
    assert any("Transformer Engine" in refusal for refusal in report.refusals) == bool(gpus and installed)
