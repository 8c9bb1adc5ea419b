"""Flags of the loss act: on the parts that the objective is made of, against the definitions."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.model.build import advantages_of
from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.table import algorithm
from services.trainer.rl.objective import weights_of
from tests.support.ranks.micro_inputs import micro_inputs

REWARDS = (1.0, 0.25, 0.0)


@pytest.mark.parametrize(("flags", "expected"), [("", 5.0), ("--eps-clip-c 3", 3.0), ("--eps-clip-c 10", 5.0)])
def test_eps_clip_c_bounds_the_loss_of_a_bad_answer(load_with, flags: str, expected: float) -> None:
    new = torch.full((1, 1), math.log(5.0))
    ones = torch.ones(1, 1)
    found = algorithm(load_with(*flags.split()).train).loss(new, torch.zeros(1, 1), -ones, ones)
    assert found.loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(("flags", "expected"), [("", 2.0), ("--tis-clip 3", 3.0), ("--tis-clip 9", 5.0)])
def test_tis_clip_bounds_the_importance_weights(load_with, flags: str, expected: float) -> None:
    trainer = torch.full((1, 1), math.log(5.0))
    found = weights_of(load_with("--use-tis", *flags.split()).train, micro_inputs(torch.ones(1, 1)), trainer)
    assert found.weights.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("", 0.2), ("--tis-clip-low 0.4", 0.4), ("--tis-mode clip", 0.5), ("--tis-mode clip --tis-clip-low 0.4", 0.4)],
)
def test_tis_clip_low_bounds_the_importance_weights(load_with, flags: str, expected: float) -> None:
    trainer = torch.full((1, 1), math.log(0.2))
    found = weights_of(load_with("--use-tis", *flags.split()).train, micro_inputs(torch.ones(1, 1)), trainer)
    assert found.weights.item() == pytest.approx(expected)


def test_disable_rewards_normalization_takes_the_rewards_themselves(load_with) -> None:
    facts = [_facts(index, reward) for index, reward in enumerate(REWARDS)]
    normalized = algorithm(load_with().train).rewards(facts)
    raw = algorithm(load_with("--disable-rewards-normalization").train).rewards(facts)
    assert tuple(raw.values()) == REWARDS
    assert sum(normalized.values()) == pytest.approx(0, abs=1e-6)


def _facts(index: int, reward: float) -> SampleFacts:
    return SampleFacts(
        sample_id=str(index),
        group_id="g",
        rollout_id=str(index),
        reward=reward,
        status="completed",
        prompt_length=1,
        response_length=1,
        trained_tokens=1,
        min_policy_version=0,
    )


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
