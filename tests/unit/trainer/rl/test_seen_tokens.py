"""What the sample log is given of a step's losses, and which samples are written token by token."""

from __future__ import annotations

from typing import Any

import torch

from services.trainer.rl.objective import LossInputs
from services.trainer.rl.seen_tokens import EXTREMES, LossRecord, shown_ids
from tests.support.ledgers.facts import facts
from tests.support.ranks.micro_inputs import micro_inputs

LOG_PROBS = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]])


def loss_inputs(**tensors: torch.Tensor) -> LossInputs:
    """Two responses, of three and of two tokens; the first token of the first one is not trained."""
    advantages = torch.tensor([[9.0, 1.0, 2.0], [-1.0, -1.0, 0.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    micro = micro_inputs(mask, lengths=(3, 2), advantages=advantages, **tensors)
    return LossInputs(micro, LOG_PROBS.clone().requires_grad_(), torch.zeros(2, 3))


def test_a_record_has_each_sample_of_a_step_once_and_is_empty_behind_it() -> None:
    record = LossRecord(is_policy_loss=True)
    record.add(loss_inputs())
    first, second = record.take().values()
    assert (first.advantage, first.log_prob_gap) == (1.5, 2.5)
    assert (second.advantage, second.log_prob_gap) == (-1.0, 4.5)
    columns = first.columns()
    assert (columns.tokens, columns.loss_mask) == ([0, 1, 2, 3], [0, 1, 1])
    assert (columns.trainer_log_probs, columns.engine_log_probs) == ([-1.0, -2.0, -3.0], [0.0, 0.0, 0.0])
    assert columns.advantages == [9.0, 1.0, 2.0]
    assert record.take() == {}


def test_the_log_probs_are_those_of_the_weights_that_the_step_began_with() -> None:
    record = LossRecord(is_policy_loss=True)
    record.add(loss_inputs(old_log_probs=LOG_PROBS - 1))
    assert record.take()["1"].columns().trainer_log_probs == [-5.0, -6.0]


def test_supervised_samples_have_no_advantage_and_no_engine() -> None:
    record = LossRecord(is_policy_loss=False)
    record.add(loss_inputs())
    seen = record.take()["0"]
    assert (seen.advantage, seen.log_prob_gap) == (None, None)
    columns = seen.columns()
    assert (columns.engine_log_probs, columns.advantages) == ((), ())
    assert columns.trainer_log_probs == [-1.0, -2.0, -3.0]


def test_every_eighth_step_is_shown_whole_and_the_best_and_worst_of_the_others() -> None:
    samples: list[Any] = [facts(f"{reward}", reward=float(reward)) for reward in range(40)]
    samples.append(facts("failed", reward=None, status="failed"))
    assert shown_ids(8, samples) == {sample.sample_id for sample in samples}
    extremes = {*range(EXTREMES), *range(40 - EXTREMES, 40)}
    assert shown_ids(9, samples) == {f"{reward}" for reward in extremes}
