"""A user's own loss, and a user's own way from token losses to a number, with slime's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.config.job import Job
from headrace.config.training import TrainSection
from headrace.errors import InvalidArgument
from headrace.hooks import hook_args
from headrace.hooks.trainer import trainer_hook
from services.trainer.algorithms.reduction import weighted_sum
from services.trainer.hooks import of_samples
from services.trainer.inputs import MicroInputs
from services.trainer.terms import Terms


class CustomLoss:
    """`f(args, batch, logits, sum_of_sample_mean) -> (loss, log)`: the loss of the micro-batch, summed over samples,
    and so the numbers of the log, which are reported.

    Beyond slime's keys the batch has `current_log_probs` and `entropy`, computed from the logits, with their gradients.
    """

    def __init__(self, job: Job) -> None:
        path = job.hooks.custom_loss_function_path
        assert path is not None  # the rules saw to it
        self._path = path
        self._hook = trainer_hook(path, "loss").target
        self._args = hook_args(job)

    def __call__(self, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        """A share of the step's loss, and of each number of the log, as scalars."""
        micro = terms.micro
        if not micro.samples:
            return weighted_sum(terms.log_probs, micro.weights), {}

        def sum_of_sample_mean(flat: Tensor) -> Tensor:
            lengths = [sample.response_length for sample in micro.samples]
            return weighted_sum(micro.put(torch.split(flat, lengths)), micro.weights) * micro.loss_scale

        found = self._hook(self._args, _batch(terms), terms.logits, sum_of_sample_mean)
        loss, log = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(log, dict):
            raise InvalidArgument(f"hook {self._path} must return (loss, log): a tensor of one number, and a dict")
        # A loss that touches no logits still has to run backward with those of the other ranks.
        share = loss.squeeze() / micro.loss_scale + weighted_sum(terms.log_probs, torch.zeros_like(micro.weights))
        return share, {
            f"loss/custom/{name}": self._number(name, value) / micro.loss_scale for name, value in log.items()
        }

    def _number(self, name: str, value: object) -> Tensor:
        if isinstance(value, int | float):
            return torch.tensor(float(value))
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InvalidArgument(f"hook {self._path}: log[{name!r}] must be one number")
        return value.detach().float().squeeze()


class PolicyReducer:
    """`f(total_lengths, response_lengths, loss_masks, per_token) -> reducer` for the policy's part of the loss."""

    def __init__(self, path: str, config: TrainSection) -> None:
        self._path = path
        self._hook = trainer_hook(path, "reducer").target
        self._per_token = config.calculate_per_token_loss

    def of(self, micro: MicroInputs) -> Callable[[Tensor, Tensor], Tensor]:
        """In the place of `weighted_sum`, for this micro-batch."""

        def reduce(per_token: Tensor, weights: Tensor) -> Tensor:
            if not micro.samples:
                return weighted_sum(per_token, weights)
            facts = of_samples(micro.samples)
            masks = micro.cut(micro.mask)
            lengths = [len(mask) for mask in masks]
            reducer = self._hook(facts["total_lengths"], lengths, masks, self._per_token)
            found = reducer(torch.cat(micro.cut(per_token)))
            if not isinstance(found, Tensor) or found.numel() != 1:
                raise InvalidArgument(f"hook {self._path}: its reducer must return a tensor of one number")
            return found.squeeze() / micro.loss_scale

        return reduce


def _batch(terms: Terms) -> dict[str, Any]:
    micro = terms.micro
    cut = micro.cut
    facts = of_samples(micro.samples)
    return facts | {
        "unconcat_tokens": facts["tokens"],
        "loss_masks": cut(micro.mask),
        "advantages": cut(micro.advantages),
        "returns": cut(micro.returns),
        "rollout_log_probs": cut(micro.rollout_log_probs),
        "log_probs": cut(terms.trainer_log_probs),
        "ref_log_probs": None if terms.reference_log_probs is None else cut(terms.reference_log_probs),
        "current_log_probs": cut(terms.log_probs),
        "entropy": cut(terms.entropy),
    }
