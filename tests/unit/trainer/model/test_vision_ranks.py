"""A model with a vision tower in real ranks over gloo equals transformers' whole model, for images and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.long_forms import ALL
from tests.support.models.float64_reference import log_probs_of
from tests.support.models.tiny_vision import PATCH_VALUES, make_tiny_vision, vision_network
from tests.support.ranks.rank_results import metrics, weights
from tests.support.ranks.ranks import run_cases
from tests.support.ranks.vision_cases import VisionCase, samples

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl@alone": (1, {}, {}),
    "qwen2_5_vl@cp2": (2, CP2, {}),
    "qwen3_vl@alone": (1, {}, {}),
    "qwen3_vl@sp2": (2, SP2, {}),
    "qwen3_vl@pp2": (2, PP2 | FULL, {"micro_batch_size": 1}),
}
if ALL:
    RUNS |= {
        "qwen2_5_vl@tp2": (2, TP2, {}),
        "qwen2_5_vl@pp2": (2, PP2, {}),
        "qwen2_5_vl@sp2": (2, SP2, {}),
        "qwen3_vl@tp2": (2, TP2, {}),
        "qwen3_vl@cp2": (2, CP2, {}),
    }
    RUNS |= {f"{name}@{how}": (1, {}, {"packing": how}) for name in PATCH_VALUES for how in ("padded", "packed")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    cases = []
    for name, (ranks, megatron, train) in RUNS.items():
        model = folder / _family(name)
        if not model.exists():
            make_tiny_vision(model, model.name)
        sections = {"megatron": megatron, "train": train}
        cases.append(VisionCase(name, str(folder), str(model), sections, ranks, PATCH_VALUES[model.name]))
    run_cases(folder, 2, cases)
    return folder


@pytest.mark.parametrize("run", RUNS)
def test_log_probs_with_images_are_those_of_transformers(runs: Path, run: str) -> None:
    _assert_log_probs(runs, run, "log_probs.json", runs / _family(run))


@pytest.mark.parametrize("family", PATCH_VALUES)
def test_a_step_has_the_loss_and_the_gradient_of_the_language_part_that_transformers_has(
    runs: Path, family: str
) -> None:
    model = vision_network(runs / family)
    every = samples(PATCH_VALUES[family])
    total = torch.zeros((), dtype=torch.float64)
    for sample in every:
        rewards = torch.tensor([s.reward for s in every if s.group_id == sample.group_id], dtype=torch.float64)
        advantage = (float(sample.reward or 0.0) - rewards.mean()) / (rewards.std() + 1e-6)
        ratio = (
            log_probs_of(model, sample, temperature=1.0) - torch.from_numpy(sample.rollout_log_probs).double()
        ).exp()
        loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
        mask = torch.from_numpy(sample.loss_mask).double()
        total = total + (loss * mask).sum() / mask.sum() / len(every)
    total.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "visual" not in name and p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    (found,) = metrics(runs / f"{family}@alone")
    assert found["loss/policy"] == pytest.approx(total.item(), abs=1e-5)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("run", [name for name in RUNS if not name.endswith("@alone")])
def test_training_with_images_depends_neither_on_layout_nor_on_packing(runs: Path, run: str) -> None:
    expected = weights(runs / f"{_family(run)}@alone" / "trained")
    for name, weight in weights(runs / run / "trained").items():
        assert (weight - expected[name]).norm() / expected[name].norm() < 1e-5, name


@pytest.mark.parametrize("run", RUNS)
def test_an_export_has_the_tower_as_it_was_and_transformers_computes_what_the_trainer_does(
    runs: Path, run: str
) -> None:
    before, initial, trained = (
        weights(folder) for folder in (runs / _family(run), runs / run / "initial", runs / run / "trained")
    )
    assert before.keys() == initial.keys() == trained.keys()
    assert all(torch.equal(before[name], initial[name]) for name in before)
    assert {name for name in before if torch.equal(before[name], trained[name])} == {
        name for name in before if "visual." in name
    }
    _assert_log_probs(runs, run, "log_probs_after.json", runs / run / "trained")


def _family(run: str) -> str:
    return run.split("@")[0]


def _assert_log_probs(runs: Path, run: str, file: str, folder: Path) -> None:
    model, found = vision_network(folder), json.loads((runs / run / file).read_text())
    for row, sample in zip(found, samples(PATCH_VALUES[_family(run)]), strict=True):
        with torch.no_grad():
            expected = log_probs_of(model, sample, temperature=1.0)
        assert torch.allclose(torch.tensor(row, dtype=torch.float64), expected, rtol=0, atol=2e-5), sample.sample_id
