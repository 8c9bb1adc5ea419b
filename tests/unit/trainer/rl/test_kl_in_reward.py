"""A KL that is taken from the reward has the KL's gradient in expectation, exactly, or it is another penalty."""

from __future__ import annotations

import pytest
import torch

from services.trainer.model.build import advantages_of
from tests.support.ranks.micro_inputs import micro_inputs

PPO = "--advantage-estimator ppo --kl-coef 0.25"


def relative_error(load_with, flags: str) -> float:
    """Of Σ_a π(a) A(a) ∇ log π(a) against -kl_coef · ∇ KL(π, π_ref), over all three actions of one token."""
    logits = torch.tensor([0.3, -0.9, 0.6], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    reference = torch.tensor([-0.8, 0.7, 0.1], dtype=torch.float64).log_softmax(-1)
    own, other = policy.detach()[:, None].float(), reference[:, None].float()
    known = micro_inputs(torch.ones(3, 1), own_log_probs=own, reference_log_probs=other, values=torch.zeros(3, 1))
    (micro,) = advantages_of(load_with(*flags.split()), None)([known])
    advantages = micro.advantages[:, 0].double()
    (found,) = torch.autograd.grad((policy.detach().exp() * advantages * policy).sum(), logits, retain_graph=True)
    (gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    expected = -0.25 * gradient
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("flags", [PPO, f"{PPO} --kl-reward-type k1"])
def test_the_kl_in_the_reward_has_the_gradient_of_the_kl(load_with, flags: str) -> None:
    assert relative_error(load_with, flags) < 1e-6


@pytest.mark.parametrize("kl_type", ["k2", "k3", "low_var_kl"])
def test_the_other_estimators_have_another_gradient_there(load_with, kl_type: str) -> None:
    assert relative_error(load_with, f"{PPO} --kl-reward-type {kl_type}") > 0.3
