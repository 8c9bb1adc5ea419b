"""From samples to advantages and to a step's loss without ranks: samples without a reward, and float64 references."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.job.schema.job import Job
from headrace.trajectory import Sample, Status
from services.trainer.megatron.parallel import Context
from services.trainer.model.build import advantages_of
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.planning import Planner
from services.trainer.rl.algorithms.numerics import Reduction, weighted_sum
from services.trainer.rl.algorithms.table import algorithm
from services.trainer.rl.inputs import MicroInputs, step_inputs
from tests.support.ledgers.facts import facts

LAYOUT: Any = SimpleNamespace(
    device=torch.device("cpu"), context=Context(0, 1, cast(Any, None)), data_rank=0, data_group=None
)


def sample(index: int, mask: list[int], reward: float | None, *, prompt: int = 1, group: str = "g") -> Sample:
    return Sample(
        sample_id=f"s{group}{index}",
        group_id=group,
        index=index,
        prompt="",
        response="",
        tokens=np.arange(prompt + len(mask), dtype=np.int32),
        loss_mask=np.array(mask, np.uint8),
        rollout_log_probs=np.full(len(mask), -1.0, np.float32),
        status=Status.COMPLETED,
        reward=reward,
    )


def inputs_of(samples: list[Sample], job: Job) -> list[MicroInputs]:
    facts = [SampleFacts.of(s.pack().envelope) for s in samples]
    (plan,) = Planner(1, "packed", 8, None, None).plan(facts, 1)
    fetched = {s.sample_id: s for s in samples}
    return step_inputs(plan, 0, facts, algorithm(job.train).rewards(facts), fetched, job.train, LAYOUT, "packed")


def job_of(**train: Any) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": "/x"}, "train": train})


def trained(samples: list[Sample], kl: torch.Tensor | None = None, **train: Any) -> MicroInputs:
    """The one micro-batch with its advantages; `kl` is what the reference's log-probs lack of the policy's."""
    job = job_of(**train)
    (micro,) = inputs_of(samples, job)
    own = micro.rollout_log_probs
    reference = own if kl is None else own - kl[: own.shape[0], : own.shape[1]]
    known = replace(micro, own_log_probs=own, reference_log_probs=reference, values=torch.zeros_like(own))
    (found,) = advantages_of(job, None)([known])
    return found


ESTIMATORS: dict[str, dict[str, Any]] = {
    "reinforce_plus_plus": {"normalize_advantages": True},
    "reinforce_plus_plus_baseline": {"normalize_advantages": True},
    "ppo": {},
    "grpo": {},
    "rloo": {},
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[None, 0.5, -2.0, 0.25], [7.0, None]])
def test_a_sample_without_a_reward_changes_nothing_for_the_others(estimator: str, rewards: list[float | None]) -> None:
    """Neither whitening, nor a group's mean, nor a divisor of the loss knows of it."""
    options: dict[str, Any] = {"advantage_estimator": estimator, **ESTIMATORS[estimator]}
    with_it = trained([sample(i, [1, 1], reward) for i, reward in enumerate(rewards)], **options)
    without = trained([sample(i, [1, 1], r) for i, r in enumerate(rewards) if r is not None], **options)
    kept = [row for row, one in enumerate(with_it.samples) if one.reward is not None]
    assert torch.equal(with_it.advantages[kept], without.advantages)
    assert torch.equal(with_it.weights[kept], without.weights)
    assert float((with_it.weights * with_it.mask).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("mask", [[1, 1], [1, 0, 1], [1, 1, 1, 0], [0, 1, 1]])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_first_token_of_a_response_without_a_prompt_is_in_no_divisor(mask: list[int], per_token: bool) -> None:
    micro = trained([sample(0, mask, 1.0, prompt=0)], advantage_estimator="grpo", calculate_per_token_loss=per_token)
    assert micro.mask[0].tolist() == [0.0, *mask[1:]]
    assert float((micro.weights * micro.mask).sum()) == pytest.approx(1.0)


KL = torch.tensor([[0.02, -0.01, 0.03], [0.01, 0.04, -0.02]])


@pytest.mark.parametrize("reward", [1e2, 1e3, -2.5e4, 1e5])
def test_a_small_kl_beside_large_equal_rewards_is_whitened_as_in_float64(reward: float) -> None:
    micro = trained(
        [sample(0, [1, 1, 1], reward), sample(1, [1, 1, 1], reward)],
        KL, advantage_estimator="reinforce_plus_plus", normalize_advantages=True, kl_coef=0.01,
    )  # fmt: skip
    # The reference's log-probs are float32: the KL is what is left of them.
    tokens = -0.01 * (micro.rollout_log_probs - (micro.rollout_log_probs - KL)).double()
    tokens[:, -1] += reward
    returns = tokens.flip(1).cumsum(1).flip(1)
    expected = (returns - returns.mean()) * (returns.var() + 1e-8).rsqrt()
    assert torch.allclose(micro.advantages.double(), expected, rtol=0, atol=1e-5)


MODES = ("rollout", "token", "constant")
CONSTANT = 7.0


def reduction(samples: Sequence[SampleFacts], mode: str) -> Reduction:
    return Reduction.of(samples, per_token=mode == "token", constant=CONSTANT if mode == "constant" else None)


def step_loss(masks: Tensor, losses: Tensor, parts: Sequence[Sequence[int]], mode: str) -> float:
    samples = [facts(str(i), trained_tokens=int(mask.sum())) for i, mask in enumerate(masks)]
    found = reduction(samples, mode)
    weights = torch.tensor([[found.weight(s.sample_id)] for s in samples]) * masks
    return sum(weighted_sum(losses[rows], weights[rows]).item() for rows in map(list, parts))


@given(st.integers(1, 8), st.sampled_from(MODES), st.randoms(use_true_random=False))
def test_the_loss_of_a_step_is_the_reference_however_it_is_split(n: int, mode: str, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    masks = torch.randint(0, 2, (n, 6), generator=generator)
    masks[0] = 0
    losses = torch.randn(n, 6, generator=generator)
    order = rng.sample(range(n), n)
    size = rng.randint(1, n)
    parts = [order[i : i + size] for i in range(0, n, size)]

    rows = [(m.astype(float), x) for m, x in zip(masks.numpy(), losses.double().numpy(), strict=True)]
    total = sum(m.sum() for m, _ in rows)
    length = {"rollout": lambda m: m.sum(), "token": lambda m: total / n, "constant": lambda m: CONSTANT}[mode]
    expected = sum((m * x).sum() / max(length(m), 1 / n) for m, x in rows) / n
    assert step_loss(masks, losses, parts, mode) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_fully_masked_samples_is_zero(mode: str) -> None:
    losses = torch.full((2, 3), math.inf)
    assert step_loss(torch.zeros(2, 3), losses, [[0], [1]], mode) == 0.0


def test_a_rollout_that_is_masked_in_whole_counts_with_a_loss_of_zero() -> None:
    samples = [facts("a", trained_tokens=4), facts("masked", trained_tokens=0)]
    found = Reduction.of(samples)
    assert (found.num_rollouts, found.num_tokens) == (2, 4)
    assert [found.weight(s.sample_id) for s in samples] == [0.125, 0.0]
    assert Reduction.of(samples, constant=CONSTANT).weight("a") == 1 / CONSTANT / 2
    assert Reduction.of(samples, per_token=True).weight("a") == 0.25


def test_a_rollout_that_fanned_out_weighs_as_much_as_one_that_did_not() -> None:
    """Three samples of one rollout, 2 + 3 + 5 tokens, beside a rollout of 4: each rollout is half of the loss."""
    fanned = [facts(f"f{i}", trained_tokens=n, rollout_id="fanned") for i, n in enumerate((2, 3, 5))]
    found = Reduction.of([*fanned, facts("plain", trained_tokens=4)])
    assert found.num_rollouts == 2
    assert [found.weight(s.sample_id) for s in fanned] == [0.05] * 3
    assert found.weight("plain") == 0.125
    assert sum(found.weight(s.sample_id) * s.trained_tokens for s in fanned) == pytest.approx(0.5)
