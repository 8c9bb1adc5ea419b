"""Checkpoints between Megatron-core as it is and headrace, in both directions and under other layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.models.registry import read_architecture
from headrace.models.torch_dist import rows_of
from services.trainer.hugging_face.torch_dist import TorchDistFolder
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.ranks import run_cases
from tests.support.ranks.torch_dist_cases import DENSE, MIXED, TOKENS, TorchDistCase

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TP2, PP2, EP2 = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
VARIANTS: dict[str, dict[str, Any]] = {
    "one-by-one": {"metadata": {"singleton_local_shards": True}},
    "stacked": {"moe_layer_freq": 1},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch-dist")
    make_tiny(folder / "qwen3" / "model", "qwen3")
    make_tiny(folder / "qwen3_moe" / "model", "qwen3_moe")
    cases = [
        TorchDistCase(str(folder / "qwen3"), TP2, PP2, DENSE, {}),
        TorchDistCase(str(folder / "qwen3_moe"), EP2, PP2, MIXED, VARIANTS, option="load"),
    ]
    run_cases(folder, 2, cases)
    return folder


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_headrace_starts_with_the_weights_that_megatron_core_saved(runs: Path, family: str) -> None:
    saved = _logits(runs / family / "saved.json")
    model = AutoModelForCausalLM.from_pretrained(runs / family / "exported", dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0]
    assert saved.std() > 0.1
    torch.testing.assert_close(found, saved, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_megatron_core_loads_what_headrace_exported(runs: Path, family: str) -> None:
    assert torch.equal(_logits(runs / family / "loaded.json"), _logits(runs / family / "saved.json"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_of_megatron_core_to_name_experts_is_read(runs: Path, variant: str) -> None:
    folder = runs / "qwen3_moe"
    architecture = read_architecture(folder / "model")
    usual, other = (TorchDistFolder(folder / name, architecture) for name in ("plain", variant))
    for row, _ in rows_of(architecture):
        assert all(torch.equal(a, b) for a, b in zip(usual.parts(row), other.parts(row), strict=True)), row


def _logits(path: Path) -> Tensor:
    return torch.tensor(json.loads(path.read_text()))
