"""The same global batch gives the same step, however it is cut, laid into rows and spread over ranks.

Uneven groups, masked tokens, a sample that is masked in whole and one that failed; two optimizer steps with KL, entropy
and importance weights, in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.long_forms import ALL
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.rank_cases import Case, ways_of
from tests.support.ranks.rank_results import metrics, weights
from tests.support.ranks.ranks import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TOLERANCE = 1e-5
CP2 = {"context_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3@alone": (1, {}),
    "qwen3@dp2": (2, {"use_distributed_optimizer": True}),
    "qwen3@cp2": (2, CP2),
    "qwen3_moe@alone": (1, {}),
    "qwen3_moe@cp2-ep2": (2, CP2 | {"expert_model_parallel_size": 2}),
    "qwen3_next@alone": (1, {}),
    "qwen3_next@cp2": (2, CP2),
    "deepseek_v3@alone": (1, {}),
    "deepseek_v3@cp2": (2, CP2),
    "nemotron_h@alone": (1, {}),
    "nemotron_h@cp2": (2, CP2),
    "gpt_oss@alone": (1, {}),
    "gpt_oss@cp2": (2, CP2),
}
"""Dense, with experts, and with experts and linear attention, latent attention, or windows and sinks."""
if ALL:
    LAYOUTS |= {
        "minimax_m2@alone": (1, {}),
        "minimax_m2@cp2": (2, CP2),
        "gemma3_text@alone": (1, {}),
        "gemma3_text@cp2": (2, CP2),
        "gemma3_text@cp2-tp2": (4, CP2 | TP2),
        "olmo3@alone": (1, {}),
        "olmo3@cp2": (2, CP2),
        "olmo3@cp2-tp2": (4, CP2 | TP2),
        "qwen3@tp2": (2, TP2),
        "qwen3@pp2": (2, {"pipeline_model_parallel_size": 2}),
        "qwen3@cp2-tp2": (4, CP2 | TP2),
        "qwen3_moe@ep2": (2, {"expert_model_parallel_size": 2}),
        "qwen3@dp2-tp2": (4, TP2),
        "qwen3@dp2-cp2": (4, CP2),
    }
RUNS = [f"{layout}/{way}" for layout, (_, megatron) in LAYOUTS.items() for way in ways_of(megatron)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all results."""
    folder = tmp_path_factory.mktemp("invariance")
    for family in {name.split("@")[0] for name in LAYOUTS}:
        make_tiny(folder / family, family)
    cases = [
        Case(name, str(folder), str(folder / name.split("@")[0]), {"megatron": megatron}, ranks, work="ways")
        for name, (ranks, megatron) in LAYOUTS.items()
    ]
    run_cases(folder, max(case.ranks or 1 for case in cases), cases)
    return folder


@pytest.mark.parametrize("run", RUNS)
def test_loss_gradient_norm_and_updated_weights_are_those_of_one_rank_and_padded_rows(runs: Path, run: str) -> None:
    """With packing, use_dynamic_batch_size, max_tokens_per_gpu and context_parallel_size as the run's name says."""
    baseline = f"{run.split('@')[0]}@alone/static-padded"
    (found,), (expected,) = metrics(runs / run), metrics(runs / baseline)
    for name in ("loss/policy", "loss/kl", "loss/entropy", "entropy", "ratio/mean", "grad_norm"):
        # A loss is a sum of terms of either sign, of about 1 each: where little is left of them, so is of their digits.
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=1e-6), name
    assert found["tokens"] == expected["tokens"]
    wanted, before = weights(runs / baseline / "weights"), weights(runs / run.split("@")[0])
    for name, weight in weights(runs / run / "weights").items():
        assert (weight - wanted[name]).norm() < TOLERANCE * wanted[name].norm(), name
        is_trained = not name.endswith("e_score_correction_bias")  # the router's own balance stays as it was
        assert weight.equal(before[name]) is not is_trained, name
