"""The same global batch gives the same step, however it is cut, laid into rows and spread over ranks.

Uneven groups, masked tokens, a sample that is masked in whole and one that failed; two optimizer steps with KL, entropy
and importance weights, in float32. One launch for each number of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.support.invariance_cases import WAYS, LayoutCase
from tests.support.ranks import run_cases
from tests.support.tiny_families import make_tiny

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5
TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "dp2": (2, {"use_distributed_optimizer": True}),
    "tp2": (2, TP2),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2-tp2": (4, TP2),
}
BASELINE = "alone/static-padded"
RUNS = [f"{layout}/{way}" for layout in LAYOUTS for way in WAYS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all results."""
    folder = tmp_path_factory.mktemp("invariance")
    checkpoint = make_tiny(folder / "model", "qwen3", tied=True)
    for world_size in (1, 2, 4):
        cases = [
            LayoutCase(name, str(folder), str(checkpoint), megatron)
            for name, (ranks, megatron) in LAYOUTS.items()
            if ranks == world_size
        ]
        run_cases(folder, world_size, cases, module="tests.support.invariance_cases")
    return folder


@pytest.mark.parametrize("run", RUNS)
def test_loss_and_gradient_norm_are_those_of_one_rank_and_padded_rows(runs: Path, run: str) -> None:
    found, expected = _metrics(runs, run), _metrics(runs, BASELINE)
    for name in ("loss/policy", "loss/kl", "loss/entropy", "entropy", "ratio/mean", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=1e-7), name
    assert found["tokens"] == expected["tokens"]


@pytest.mark.parametrize("run", RUNS)
def test_updated_weights_are_those_of_one_rank_and_padded_rows(runs: Path, run: str) -> None:
    expected, before = _weights(runs / BASELINE / "weights"), _weights(runs / "model")
    for name, weight in _weights(runs / run / "weights").items():
        assert (weight - expected[name]).norm() < TOLERANCE * expected[name].norm(), name
        assert not weight.equal(before[name]), name


def _metrics(runs: Path, run: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((runs / run / "metrics.json").read_text())
    return found


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
