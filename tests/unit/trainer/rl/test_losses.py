"""Losses, KL estimates, importance weights and mismatch metrics against references in float64, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

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
from services.trainer.rl.algorithms.mis import MisLevel, MisMode, mis_weights, mismatch, opsm_mask
from services.trainer.rl.algorithms.ppo import value_loss
from services.trainer.rl.objective import LossInputs, choose_corrections
from tests.support.ranks.micro_inputs import micro_inputs

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


LEVELS, MODES = get_args(MisLevel), get_args(MisMode)


def batch(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Four answers of seven tokens by trainer and engine, with holes in the mask; the last is masked in whole."""
    rng = np.random.default_rng(seed)
    engine = rng.uniform(-3, -0.1, (4, 7))
    mask = rng.integers(0, 2, (4, 7))
    mask[:3, 0], mask[3] = 1, 0
    return engine + rng.normal(size=(4, 7)) * 0.3, engine, mask


def ratios(gap: np.ndarray, mask: np.ndarray, level: str) -> np.ndarray:
    if level == "token":
        return np.exp(gap)
    sums = (gap * mask).sum(1, keepdims=True)
    means = sums / np.maximum(mask.sum(1, keepdims=True), 1)
    return np.exp(sums if level == "sequence" else means) * np.ones_like(gap)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_the_definition_at_every_level_and_in_every_mode(level: MisLevel, mode: MisMode, seed: int) -> None:
    trainer, engine, mask = batch(seed)
    ratio = ratios(trainer - engine, mask, level)
    expected = {
        "truncate": np.clip(ratio, 0.8, 1.3),
        "clip": np.clip(ratio, 0.8, 1.3),
        "mask": np.where((ratio >= 0.8) & (ratio <= 1.3), ratio, 0.0),
    }[mode]
    found = mis_weights(torch.tensor(trainer), torch.tensor(engine), torch.tensor(mask), level, 0.8, 1.3, mode)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-9)
    assert (found.truncated.numpy() == (expected != ratio)).all()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("veto", [None, 0.7])
def test_rejection_has_bounds_of_its_own_and_a_veto(load_with, level: str, veto: float | None, seed: int) -> None:
    flags = f"--use-tis --tis-clip 5 --use-rs --rs-level {level} --rs-lower-bound 0.9 --rs-upper-bound 1.2"
    job = load_with(*flags.split(), *([] if veto is None else ["--rs-veto-threshold", str(veto)]))
    trainer, engine, mask = batch(seed)
    ratio = ratios(trainer - engine, mask, level)
    kept = (ratio >= 0.9) & (ratio <= 1.2)
    if veto is not None:
        kept &= ~((np.exp(trainer - engine) < veto) & (mask == 1)).any(1, keepdims=True)
    expected = np.where(kept, np.minimum(np.exp(trainer - engine), 5), 0)
    micro = micro_inputs(torch.tensor(mask), rollout_log_probs=torch.tensor(engine))
    terms = LossInputs(micro, torch.tensor(trainer), torch.zeros(4, 7))
    loss = torch.ones(4, 7, dtype=torch.float64)
    for correct in choose_corrections(job.train, None):
        loss = correct(terms, terms.trainer_log_probs, loss).loss
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_the_metrics_are_their_definitions_over_answers(seed: int) -> None:
    trainer, engine, mask = batch(seed)
    rows = [(t[m == 1], e[m == 1]) for t, e, m in zip(trainer, engine, mask, strict=True) if m.any()]
    expected = {
        "training_log_ppl": [-t.mean() for t, _ in rows],
        "training_ppl": [np.exp(-t.mean()) for t, _ in rows],
        "rollout_log_ppl": [-e.mean() for _, e in rows],
        "rollout_ppl": [np.exp(-e.mean()) for _, e in rows],
        "kl": [(e - t).mean() for t, e in rows],
        "k3_kl": [(np.exp(t - e) - 1 - (t - e)).mean() for t, e in rows],
        "log_ppl_diff": [e.mean() - t.mean() for t, e in rows],
        "log_ppl_abs_diff": [abs(e.mean() - t.mean()) for t, e in rows],
        "ppl_ratio": [np.exp(e.mean() - t.mean()) for t, e in rows],
        "chi2_token": [(np.exp(t - e) ** 2).mean() - 1 for t, e in rows],
        "chi2_sequence": [np.exp((t - e).sum()) ** 2 - 1 for t, e in rows],
    }
    found = dict(mismatch(*map(torch.tensor, (trainer, engine, mask))))
    assert found.pop("answers") == len(rows)
    assert found == {f"mismatch/{name}": pytest.approx(sum(values), rel=1e-9) for name, values in expected.items()}
