"""The same global batch gives the same step, however it is cut, laid into rows and spread over ranks.

Uneven groups, masked tokens, a sample that is masked in whole and one that failed; two optimizer steps with KL, entropy
and importance weights, in float32. One launch for each number of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.long_forms import ALL
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.invariance_cases import LayoutCase, ways_of
from tests.support.ranks.rank_results import weights
from tests.support.ranks.ranks import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TOLERANCE = 1e-5
CP2 = {"context_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3@alone": (1, {}),
    "qwen3@dp2": (2, {"use_distributed_optimizer": True}),
    "qwen3@tp2": (2, TP2),
    "qwen3@pp2": (2, {"pipeline_model_parallel_size": 2}),
    "qwen3@cp2": (2, CP2),
    "qwen3@cp2-tp2": (4, CP2 | TP2),
    "qwen3_moe@alone": (1, {}),
    "qwen3_moe@ep2": (2, {"expert_model_parallel_size": 2}),
    "qwen3_moe@cp2-ep2": (2, CP2 | {"expert_model_parallel_size": 2}),
    "deepseek_v3@alone": (1, {}),
    "deepseek_v3@cp2": (2, CP2),
    **({"qwen3@dp2-tp2": (4, TP2), "qwen3@dp2-cp2": (4, CP2)} if ALL else {}),
}
"""Dense, with experts, and with experts and latent attention."""
RUNS = [f"{layout}/{way}" for layout, (_, megatron) in LAYOUTS.items() for way in ways_of(megatron)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all results."""
    folder = tmp_path_factory.mktemp("invariance")
    families = {name.split("@")[0] for name in LAYOUTS}
    checkpoints = {family: make_tiny(folder / family, family) for family in families}
    for world_size in (1, 2, 4):
        cases = [
            LayoutCase(name, str(folder), str(checkpoints[name.split("@")[0]]), megatron)
            for name, (ranks, megatron) in LAYOUTS.items()
            if ranks == world_size
        ]
        run_cases(folder, world_size, cases, 600.0, "tests.support.ranks.invariance_cases")
    return folder


@pytest.mark.parametrize("run", RUNS)
def test_loss_and_gradient_norm_are_those_of_one_rank_and_padded_rows(runs: Path, run: str) -> None:
    found, expected = _metrics(runs, run), _metrics(runs, _baseline(run))
    for name in ("loss/policy", "loss/kl", "loss/entropy", "entropy", "ratio/mean", "grad_norm"):
        # A loss is a sum of terms of either sign, of about 1 each: where little is left of them, so is of their digits.
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=1e-6), name
    assert found["tokens"] == expected["tokens"]


@pytest.mark.parametrize("run", RUNS)
def test_updated_weights_are_those_of_one_rank_and_padded_rows(runs: Path, run: str) -> None:
    expected, before = weights(runs / _baseline(run) / "weights"), weights(runs / run.split("@")[0])
    for name, weight in weights(runs / run / "weights").items():
        assert (weight - expected[name]).norm() < TOLERANCE * expected[name].norm(), name
        is_trained = not name.endswith("e_score_correction_bias")  # the router's own balance stays as it was
        assert weight.equal(before[name]) is not is_trained, name


def _baseline(run: str) -> str:
    return f"{run.split('@')[0]}@alone/static-padded"


def _metrics(runs: Path, run: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((runs / run / "metrics.json").read_text())
    return found
