"""One token on which two policies differ beyond all bounds leaves every gradient and every figure finite."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.model.build import objective_of
from services.trainer.rl.algorithms.algorithm import policy_loss
from services.trainer.rl.objective import LossInputs, LossOutputs, Objective
from tests.support.ranks.micro_inputs import micro_inputs

KL = "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type"
FORMS = [
    "--advantage-estimator grpo",
    "--advantage-estimator gspo",
    "--advantage-estimator cispo",
    "--advantage-estimator rloo --eps-clip-c 3",
    "--calculate-per-token-loss --entropy-coef 0.1",
    "--use-rollout-logprobs",
    *(f"{KL} {kl}" for kl in ("k2", "k3", "low_var_kl")),
    *(f"{KL} {kl} --use-unbiased-kl" for kl in ("k3", "low_var_kl")),
    "--use-opsm",
    "--use-tis",
    "--use-tis --tis-mode icepop",
    *(
        f"--use-tis --tis-mode {mode} --tis-level {level} --use-rs --rs-level {level} --rs-veto-threshold 1e-4"
        for mode, level in (("truncate", "token"), ("clip", "sequence"), ("mask", "geometric"))
    ),
    "--loss-type sft_loss",
]
ATTACKS: Mapping[str, Mapping[str, float]] = {
    "ratio e^100": {"new": -0.5, "old": -100.5},
    "ratio e^-100": {"new": -100.5, "old": -0.5},
    "new -1000": {"new": -1000.0, "old": -0.5},
    "engine -1000": {"new": -0.5, "old": -0.5, "engine": -1000.0},
    "reference -1000": {"new": -0.5, "old": -0.5, "reference": -1000.0},
    "all but the policy -1000": {"new": -0.5, "old": -1000.0, "engine": -1000.0, "reference": -1000.0},
}


def outputs(
    objective: Objective, advantage: float, mask: Tensor, token: Mapping[str, float]
) -> tuple[LossOutputs, Tensor]:
    """What two responses of three tokens come to, with `token` as the second of the first, and the gradient."""
    known = {name: torch.full((2, 3), -0.6) for name in ("new", "old", "engine", "reference")}
    for name, value in token.items():
        known[name][0, 1] = value
    new = known["new"].requires_grad_()
    micro = micro_inputs(
        mask,
        rollout_log_probs=known["engine"],
        advantages=torch.full((2, 3), advantage),
        old_log_probs=known["old"],
        reference_log_probs=known["reference"],
    )
    found = objective(LossInputs(micro, new, -new.exp() * new))
    found.loss.backward()
    assert new.grad is not None
    return found, new.grad


@pytest.mark.parametrize("attack", sorted(ATTACKS))
@pytest.mark.parametrize("flags", FORMS)
def test_one_token_makes_no_gradient_and_no_figure_infinite(load_with, flags: str, attack: str) -> None:
    objective = objective_of(load_with(*flags.split()))
    for advantage in (-1.0, 1.0):
        found, gradient = outputs(objective, advantage, torch.ones(2, 3), ATTACKS[attack])
        assert torch.isfinite(found.loss)
        assert torch.isfinite(gradient).all()
        assert torch.isfinite(found.sums).all()
        assert torch.isfinite(found.largest).all()


@pytest.mark.parametrize("attack", sorted(ATTACKS))
@pytest.mark.parametrize("flags", FORMS)
def test_a_token_that_is_not_trained_changes_nothing_whatever_its_ratio(load_with, flags: str, attack: str) -> None:
    objective = objective_of(load_with(*flags.split()))
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    for advantage in (-1.0, 1.0):
        found, gradient = outputs(objective, advantage, mask, ATTACKS[attack])
        clean, expected = outputs(objective, advantage, mask, {})
        assert torch.equal(found.loss, clean.loss)
        assert torch.equal(gradient, expected)
        assert torch.equal(found.sums, clean.sums)


@pytest.mark.parametrize("gap", [-1000.0, -100.0, -20.0, -3.0, 3.0, 20.0, 100.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_the_clipped_loss_takes_log_ratios_as_if_they_ended_at_twenty(gap: float, advantage: float) -> None:
    ratio = np.exp(np.clip(np.float64(gap), -20, 20))
    expected = max(-ratio * advantage, -np.clip(ratio, 0.8, 1.3) * advantage)
    new = torch.tensor([[gap - 1000.0]], dtype=torch.float64)
    found, _ = policy_loss(
        new, torch.tensor([[-1000.0]], dtype=torch.float64), torch.tensor([[advantage]]), 0.2, 0.3, None
    )
    assert found.item() == pytest.approx(expected, rel=1e-9)
