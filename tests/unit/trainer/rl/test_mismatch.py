"""Importance weights, rejection and mismatch metrics against their definitions in float64."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from services.trainer.rl.algorithms.mis import MisLevel, MisMode, mis_weights, mismatch
from services.trainer.rl.objective import LossInputs, choose_corrections
from tests.support.ranks.micro_inputs import micro_inputs

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


@pytest.mark.parametrize("seed", range(5))
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


@pytest.mark.parametrize("seed", range(5))
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


@pytest.mark.parametrize("seed", range(5))
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
