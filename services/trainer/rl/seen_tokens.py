"""What the loss has seen of each sample's tokens, for people to read: the trainer's log-probs and the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.sample_log import TokenColumns
from headrace.trajectory import Sample
from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.inputs import MicroInputs
from services.trainer.rl.objective import LossInputs

EVERY = 8
"""Each so many steps, beginning with the first, all samples are kept token by token."""
EXTREMES = 8
"""In the other steps so many with the highest reward are, and so many with the lowest."""
_DIGITS = 4

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens:
    """One sample in the loss of a step; arrays are [R]."""

    sample: Sample
    mask: Floats
    trainer_log_probs: Floats
    advantages: Floats
    is_policy_loss: bool
    """False for SFT: no engine sampled the tokens, and they have no advantage."""

    @property
    def advantage(self) -> float | None:
        """Mean over the trained tokens; None without one."""
        return self._mean(self.advantages)

    @property
    def log_prob_gap(self) -> float | None:
        """Mean of |log π_trainer − log π_rollout| over the trained tokens; None without one."""
        return self._mean(np.abs(self.trainer_log_probs - self.sample.rollout_log_probs))

    def columns(self) -> TokenColumns:
        return TokenColumns(
            sample_id=self.sample.sample_id,
            tokens=self.sample.tokens.tolist(),
            loss_mask=self.mask.astype(np.uint8).tolist(),
            engine_log_probs=_numbers(self.sample.rollout_log_probs) if self.is_policy_loss else (),
            trainer_log_probs=_numbers(self.trainer_log_probs),
            advantages=_numbers(self.advantages) if self.is_policy_loss else (),
        )

    def _mean(self, values: Floats) -> float | None:
        trained = values[self.mask > 0]
        if not (self.is_policy_loss and trained.size and np.isfinite(trained).all()):
            return None
        return round(float(trained.mean()), _DIGITS)


def _numbers(values: NDArray[Any]) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in np.round(values.astype(float), _DIGITS).tolist()]


class LossRecord:
    """Remembers the inputs of a step's losses until they are taken. Nothing leaves the device before."""

    def __init__(self, *, is_policy_loss: bool) -> None:
        self._is_policy_loss = is_policy_loss
        self._inputs: list[tuple[MicroInputs, Tensor]] = []

    def add(self, inputs: LossInputs) -> None:
        self._inputs.append((inputs.micro, inputs.trainer_log_probs))

    def take(self) -> dict[str, SeenTokens]:
        inputs, self._inputs = self._inputs, []
        return {seen.sample.sample_id: seen for micro, log_probs in inputs for seen in self._seen(micro, log_probs)}

    def _seen(self, micro: MicroInputs, log_probs: Tensor) -> list[SeenTokens]:
        on_host = torch.stack((micro.mask, log_probs, micro.advantages)).cpu()
        masks, trainer, advantages = (micro.cut(values) for values in on_host)
        return [
            SeenTokens(sample, mask.numpy(), log_prob.numpy(), advantage.numpy(), self._is_policy_loss)
            for sample, mask, log_prob, advantage in zip(micro.samples, masks, trainer, advantages, strict=True)
        ]


def shown_ids(step: int, samples: Sequence[SampleFacts]) -> frozenset[str]:
    """The samples of a step, counted from 0, that are written token by token. `samples` are those of all ranks."""
    if step % EVERY == 0:
        return frozenset(sample.sample_id for sample in samples)
    scored = [(sample.reward, sample.sample_id) for sample in samples if sample.reward is not None]
    return frozenset(sample_id for choose in (nlargest, nsmallest) for _, sample_id in choose(EXTREMES, scored))
