"""The formulas against references in float64, written from the papers with numpy and loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.rl.algorithms.algorithm import policy_loss
from services.trainer.rl.algorithms.kl import KlType, kl_estimate

log_ratios = st.floats(-3, 3, allow_nan=False)


def loss_reference(lr: float, advantage: float, low: float, high: float, c: float | None) -> float:
    r = math.exp(lr)
    loss = max(-r * advantage, -min(max(r, 1 - low), 1 + high) * advantage)
    return min(loss, -c * advantage) if c is not None and advantage < 0 else loss


@given(log_ratios, st.floats(-3, 3, allow_nan=False), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_is_the_reference(lr: float, advantage: float, c: float | None) -> None:
    old = -1.25
    loss, _ = policy_loss(torch.tensor([[old + lr]]), torch.tensor([[old]]), torch.tensor([[advantage]]), 0.2, 0.3, c)
    expected = loss_reference(lr, advantage, 0.2, 0.3, c)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.0, 1, 0), (1.25, 1, 0), (1.35, 1, 1), (0.5, 1, 0), (0.9, -1, 0), (0.7, -1, 1), (1.9, -1, 0), (2.1, -1, 1)],
)
def test_the_indicator_says_where_a_clip_binds_and_the_gradient_is_gone(
    ratio: float, advantage: float, clipped: float
) -> None:
    log_probs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, indicator = policy_loss(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2, 0.3, 2.0)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert indicator.item() == clipped
    assert log_probs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-5)


KL: dict[KlType, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "low_var_kl": lambda d: min(max(math.exp(-d) - 1 + d, -10), 10),
}


@given(st.floats(-8, 15, allow_nan=False), st.sampled_from(sorted(KL)))
def test_kl_is_the_reference(d: float, kl_type: KlType) -> None:
    found = kl_estimate(torch.tensor([d]), torch.tensor([0.0]), kl_type)
    assert found.item() == pytest.approx(KL[kl_type](d), rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("d", [-1000.0, -50.0, 50.0])
def test_low_var_kl_has_a_finite_gradient_however_far_the_policies_are(d: float) -> None:
    log_probs = torch.tensor([d], requires_grad=True)
    found = kl_estimate(log_probs, torch.zeros(1), "low_var_kl")
    found.sum().backward()
    assert found.item() == 10.0
    assert log_probs.grad is not None
    assert log_probs.grad.item() == 0.0
