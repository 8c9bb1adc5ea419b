"""Megatron's flags of the optimizer and its schedules act: each against its definition in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.job.megatron import MegatronArgs
from headrace.models.registry import PRESETS
from services.trainer.megatron.optimizer import parameter_schedule
from tests.support.ranks.offloading import FLAGS as OFFLOADS
from tests.support.ranks.optimizer_cases import GRADIENTS, START, OptimizerCase
from tests.support.ranks.ranks import run_cases

NUM_STEPS = 100
PLAIN: Mapping[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
COSINE = {"lr_decay_style": "cosine", "min_lr": 1e-4}
WSD = {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": "linear", "min_lr": 1e-4}


class Parameters:
    """What a schedule writes to."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, float]] = [{}]


def learning_rate(step: int, **flags: Any) -> float:
    return group_at(step, **flags)["lr"]


def group_at(step: int, **flags: Any) -> dict[str, float]:
    optimizer = Parameters()
    schedule = parameter_schedule(optimizer, MegatronArgs.model_validate(PLAIN | flags), NUM_STEPS)
    schedule.step(increment=step)
    return optimizer.param_groups[0]


def half_cosine(share: float) -> float:
    return 0.5 * (math.cos(math.pi * share) + 1)


@pytest.mark.parametrize(
    ("flag", "flags", "step", "expected"),
    [
        ("lr", {"lr": 3e-3}, 50, 3e-3),
        ("min_lr", COSINE | {"min_lr": 4e-4}, NUM_STEPS, 4e-4),
        ("lr_decay_style", {"lr_decay_style": "linear"}, 25, 1e-3 * 0.75),
        ("lr_decay_style", COSINE, 25, 1e-4 + 9e-4 * half_cosine(0.25)),
        ("lr_decay_style", {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4}, 64, 1e-3 * 2 / 8),
        ("lr_decay_style", {"lr_decay_style": "constant"}, NUM_STEPS, 1e-3),
        ("lr_decay_iters", COSINE | {"lr_decay_iters": 50}, 25, 1e-4 + 9e-4 * half_cosine(0.5)),
        ("lr_warmup_iters", {"lr_warmup_iters": 10}, 4, 4e-4),
        ("lr_warmup_fraction", {"lr_warmup_fraction": 0.1}, 4, 4e-4),
        ("lr_warmup_fraction", COSINE | {"lr_warmup_fraction": 0.5, "lr_decay_iters": 40}, 10, 5e-4),
        ("init_lr", {"lr_warmup_iters": 10, "init_lr": 5e-4}, 5, 7.5e-4),
        ("wsd_decay_steps", WSD, 90, 1e-4 + 9e-4 * 0.5),
        ("wsd_decay_steps", WSD | {"wsd_decay_steps": 40}, 90, 1e-4 + 9e-4 * 0.25),
        ("lr_wsd_decay_style", WSD | {"lr_wsd_decay_style": "minus_sqrt"}, 85, 1e-4 + 9e-4 * 0.5),
        ("lr_wsd_decay_style", WSD | {"lr_wsd_decay_style": "cosine"}, 85, 1e-4 + 9e-4 * half_cosine(0.25)),
    ],
)
def test_the_learning_rate_is_the_schedules_definition(
    flag: str, flags: Mapping[str, Any], step: int, expected: float
) -> None:
    assert flag in flags
    assert learning_rate(step, **flags) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("flag", "flags", "step", "expected"),
    [
        ("weight_decay", {"weight_decay": 0.3}, 50, 0.3),
        ("start_wd", {"start_wd": 0.02, "end_wd": 0.1, "wd_incr_style": "linear"}, 0, 0.02),
        ("end_wd", {"start_wd": 0.02, "end_wd": 0.2, "wd_incr_style": "linear"}, NUM_STEPS, 0.2),
        ("wd_incr_style", {"start_wd": 0.0, "wd_incr_style": "linear"}, 25, 0.025),
        ("wd_incr_style", {"start_wd": 0.0, "wd_incr_style": "cosine"}, 25, 0.1 * half_cosine(0.75)),
        ("wd_incr_steps", {"start_wd": 0.0, "wd_incr_style": "linear", "wd_incr_steps": 50}, 25, 0.05),
    ],
)
def test_the_weight_decay_is_the_schedules_definition(
    flag: str, flags: Mapping[str, Any], step: int, expected: float
) -> None:
    assert flag in flags
    assert group_at(step, **flags)["weight_decay"] == pytest.approx(expected, rel=1e-12)


def adam(**flags: Any) -> np.ndarray:
    """Two steps of AdamW, its gradients clipped by their norm."""
    f = {"lr": 1e-2, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "clip_grad": 0.0}
    f |= flags
    weights, first, second = START.copy(), np.zeros_like(START), np.zeros_like(START)
    for step, gradient in enumerate(GRADIENTS, 1):
        norm = float(np.linalg.norm(gradient))
        g = gradient * min(1.0, f["clip_grad"] / (norm + 1e-6)) if f["clip_grad"] else gradient
        first = f["adam_beta1"] * first + (1 - f["adam_beta1"]) * g
        second = f["adam_beta2"] * second + (1 - f["adam_beta2"]) * g * g
        moved = first / (1 - f["adam_beta1"] ** step)
        scale = np.sqrt(second / (1 - f["adam_beta2"] ** step)) + f["adam_eps"]
        weights = weights * (1 - f["lr"] * f["weight_decay"]) - f["lr"] * moved / scale
    return weights


def sgd(**flags: Any) -> np.ndarray:
    """Two steps of gradient descent with Megatron's momentum of 0.9."""
    weights, velocity = START.copy(), np.zeros_like(START)
    for gradient in GRADIENTS:
        velocity = 0.9 * velocity + gradient
        weights = weights - flags["lr"] * velocity
    return weights


REFERENCES: Mapping[str, tuple[Callable[..., np.ndarray], Mapping[str, Any]]] = {
    "plain": (adam, {}),
    "lr": (adam, {"lr": 3e-2}),
    "weight_decay": (adam, {"weight_decay": 0.5}),
    "adam_beta1": (adam, {"adam_beta1": 0.5}),
    "adam_beta2": (adam, {"adam_beta2": 0.9}),
    "adam_eps": (adam, {"adam_eps": 0.1}),
    "clip_grad": (adam, {"clip_grad": 1.0, "adam_eps": 0.1}),
    "optimizer_cpu_offload": (adam, OFFLOADS | {"lr": 3e-2}),
    "optimizer": (sgd, {"optimizer": "sgd", "lr": 1e-2}),
}
BASE = {"lr": 1e-2, "weight_decay": 0.0, "clip_grad": 0.0}


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what one rank left of each case."""
    folder = tmp_path_factory.mktemp("optimizer")
    (folder / "config.json").write_text(json.dumps(PRESETS["qwen3-0.6B"].config))
    flags_of = {name: dict(flags) for name, (_, flags) in REFERENCES.items()} | {
        "grad_reduce_in_fp32": {"bf16": True},
        "no_grad_reduce_in_fp32": {"bf16": True, "grad_reduce_in_fp32": False},
        "check_for_nan_in_grad": {},
        "no_check_for_nan_in_grad": {"check_for_nan_in_grad": False},
    }
    cases = [
        OptimizerCase(name, *(str(folder),) * 2, {"megatron": BASE | flags}, nan="nan" in name)
        for name, flags in flags_of.items()
    ]
    run_cases(folder, 1, cases)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("name", REFERENCES)
def test_two_steps_of_the_optimizer_are_its_definition(stepped: Path, name: str) -> None:
    reference, flags = REFERENCES[name]
    found = np.array(json.loads((stepped / name / "weights.json").read_text())["weights"])
    np.testing.assert_allclose(found, reference(**flags), rtol=0, atol=3e-7)
    if name != "plain":
        assert np.abs(found - adam()).max() > 1e-4


@pytest.mark.ranks
def test_grad_reduce_in_fp32_is_the_type_of_what_data_ranks_sum(stepped: Path) -> None:
    kinds = [
        json.loads((stepped / f"{no}grad_reduce_in_fp32" / "weights.json").read_text())["gradients"]
        for no in ("", "no_")
    ]
    assert kinds == ["torch.float32", "torch.bfloat16"]


@pytest.mark.ranks
def test_check_for_nan_in_grad_ends_the_step(stepped: Path) -> None:
    assert "nan" in (stepped / "check_for_nan_in_grad" / "error.txt").read_text().lower()
    assert not (stepped / "no_check_for_nan_in_grad" / "error.txt").exists()
