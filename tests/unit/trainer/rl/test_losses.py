"""GSPO, CISPO, the critic's loss, the unbiased KL and the off-policy corrections: references in float64, gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.rl.algorithms.algorithm import policy_loss, sft_loss
from services.trainer.rl.algorithms.cispo import cispo_loss
from services.trainer.rl.algorithms.gspo import sequence_log_ratio
from services.trainer.rl.algorithms.kl import KlType, kl_estimate, unbiased_kl_estimate
from services.trainer.rl.algorithms.mis import mis_weights, opsm_mask
from services.trainer.rl.algorithms.ppo import value_loss

seeds = st.integers(0, 2**31)


class Batch:
    """Three responses of six tokens, the last one masked in whole, in float64."""

    def __init__(self, seed: int, spread: float = 0.5) -> None:
        rng = np.random.default_rng(seed)
        self.new = rng.uniform(-2, -0.5, (3, 6))
        self.old = self.new - rng.normal(size=(3, 6)) * spread
        self.reference = self.new - rng.normal(size=(3, 6)) * spread
        self.advantages = rng.normal(size=(3, 6))
        self.mask = rng.integers(0, 2, (3, 6))
        self.mask[:2, 0] = 1
        self.mask[2] = 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return tuple(torch.tensor(x) for x in (self.new, self.old, self.advantages, self.mask))  # type: ignore[return-value]


def masked_mean(row: np.ndarray, mask: np.ndarray) -> float:
    return float(row[mask == 1].mean()) if mask.any() else 0.0


@given(seeds)
def test_gspo_gives_every_token_the_mean_log_ratio_of_its_answer(seed: int) -> None:
    batch = Batch(seed)
    new, old, _, mask = batch.tensors()
    found = sequence_log_ratio(new, old, mask)
    for row in range(3):
        expected = masked_mean(batch.new[row] - batch.old[row], batch.mask[row])
        np.testing.assert_allclose(found[row], [expected] * 6, rtol=1e-12, atol=1e-15)


@given(seeds)
def test_cispo_is_the_reference_and_clips_the_weight_but_not_the_gradient(seed: int) -> None:
    batch = Batch(seed, spread=1.0)
    new, old, advantages, _ = batch.tensors()
    new.requires_grad_()
    loss, clipped = cispo_loss(new, old, advantages, 0.2, 0.3)
    ratio = np.exp(batch.new - batch.old)
    weight = np.clip(ratio, 0.8, 1.3)
    np.testing.assert_allclose(loss.detach(), -weight * batch.advantages * batch.new, rtol=1e-12)
    assert (clipped.numpy() == (weight != ratio)).all()
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    np.testing.assert_allclose(gradient, -weight * batch.advantages, rtol=1e-12)


@given(seeds, st.floats(0.05, 1))
def test_the_value_loss_is_the_reference(seed: int, clip: float) -> None:
    rng = np.random.default_rng(seed)
    values, old, returns = (rng.normal(size=9) for _ in range(3))
    loss, clipped = value_loss(torch.tensor(values), torch.tensor(old), torch.tensor(returns), clip)
    near = np.clip(values, old - clip, old + clip)
    np.testing.assert_allclose(loss, np.maximum((values - returns) ** 2, (near - returns) ** 2), rtol=1e-12)
    assert (clipped.numpy() == ((near - returns) ** 2 > (values - returns) ** 2)).all()


@given(seeds, st.sampled_from(["k1", "k2", "k3", "low_var_kl"]))
@example(10359, "low_var_kl")  # one product is beyond 10
def test_the_unbiased_kl_is_the_estimate_times_the_ratio(seed: int, kl_type: KlType) -> None:
    batch = Batch(seed)
    new, old, _, _ = batch.tensors()
    reference = torch.tensor(batch.reference)
    estimate = kl_estimate(new, reference, "k3" if kl_type == "low_var_kl" else kl_type).numpy()
    expected = np.exp(batch.new - batch.old) * estimate
    if kl_type == "low_var_kl":
        expected = np.clip(expected, -10, 10)
    np.testing.assert_allclose(unbiased_kl_estimate(new, old, reference, kl_type), expected, rtol=1e-12)


def test_the_unbiased_k3_is_the_true_kl_in_expectation_under_the_old_policy() -> None:
    """Over a whole vocabulary: Σ_a π_old(a) · π/π_old · k3(a) = KL(π, ref), and the same for its gradient."""
    logits, old_logits, reference_logits = (torch.randn(11, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    new, old, reference = (x.log_softmax(-1) for x in (logits, old_logits, reference_logits))
    expectation = (old.exp() * unbiased_kl_estimate(new, old, reference, "k3")).sum()
    exact = (new.exp() * (new - reference)).sum()
    assert expectation.item() == pytest.approx(exact.item(), rel=1e-12)
    found, expected = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (expectation, exact))
    assert torch.allclose(found, expected, atol=1e-12)


def test_mis_survives_an_answer_whose_ratio_no_float_can_hold() -> None:
    gap = torch.full((1, 2000), 1.0)
    found = mis_weights(gap, torch.zeros(1, 2000), torch.ones(1, 2000), "sequence", 0.5, 2.0)
    assert not found.weights.any()
    assert torch.isfinite(found.ratio).all()


@given(seeds, st.floats(0, 0.5))
def test_opsm_masks_bad_answers_that_the_policy_left(seed: int, delta: float) -> None:
    batch = Batch(seed)
    new, old, advantages, mask = batch.tensors()
    found = opsm_mask(new, old, advantages, mask, delta)
    for row in range(3):
        moved = masked_mean(batch.old[row] - batch.new[row], batch.mask[row])
        expected = [0.0 if a < 0 and moved > delta else 1.0 for a in batch.advantages[row]]
        assert found[row].tolist() == expected


def losses(batch: Batch) -> dict[str, Callable[[Tensor], Tensor]]:
    _, old, advantages, mask = batch.tensors()
    reference = torch.tensor(batch.reference)
    zeros = torch.zeros_like(advantages)
    return {
        "sft": sft_loss,
        "k1": lambda x: kl_estimate(x, reference, "k1"),
        "k2": lambda x: kl_estimate(x, reference, "k2"),
        "k3": lambda x: kl_estimate(x, reference, "k3"),
        "low_var_kl": lambda x: kl_estimate(x, reference, "low_var_kl"),
        "unbiased k3": lambda x: unbiased_kl_estimate(x, old, reference, "k3"),
        "clipped": lambda x: policy_loss(x, old, advantages, 0.2, 0.3, 3.0)[0],
        "gspo": lambda x: policy_loss(sequence_log_ratio(x, old, mask), zeros, advantages, 0.2, 0.3, None)[0],
        "value": lambda x: value_loss(x, old, reference, 0.2)[0],
    }


@settings(max_examples=25)
@given(seeds, st.sampled_from(sorted(losses(Batch(0)))))
def test_gradients_are_those_of_finite_differences(seed: int, name: str) -> None:
    batch = Batch(seed)
    log_probs = torch.tensor(batch.new, requires_grad=True)
    assert torch.autograd.gradcheck(losses(batch)[name], (log_probs,), eps=1e-7, atol=1e-5, nondet_tol=0.0)


def test_no_gradient_reaches_old_policy_reference_or_advantages() -> None:
    batch = Batch(3)
    new, old, advantages, mask = (x.requires_grad_(x.is_floating_point()) for x in batch.tensors())
    total = (
        policy_loss(new, old, advantages, 0.2, 0.3, 3.0)[0]
        + cispo_loss(new, old, advantages, 0.2, 0.3)[0]
        + sequence_log_ratio(new, old, mask)
        + unbiased_kl_estimate(new, old, old, "k3")
        + opsm_mask(new, old, advantages, mask, 0.0)
    )
    total.sum().backward()
    assert new.grad is not None
    assert old.grad is None
    assert advantages.grad is None
