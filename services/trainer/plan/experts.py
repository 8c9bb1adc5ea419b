"""The experts that the tokens of a micro-batch go to, layer by layer: recorded in one pass, read in a later one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import InvalidArgument
from headrace.models.architecture import Experts
from headrace.trajectory import ROUTED_EXPERTS, Sample
from services.trainer.plan.rows import NOBODY, Rows

FREE = -1
"""Stands for an expert: the router chooses for this token."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertChoices:
    """Each token's experts by layer, counted from 0 over the whole model.

    int64 [positions of the rows, experts of a token], in Megatron's order (position after position of all rows), empty
    where nothing is known.
    """

    by_layer: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutChoices:
    """Reads what the engines chose, which travels with the samples."""

    num_layers: int
    experts: Experts

    def of(self, samples: Sequence[Sample], sample_numbers: Tensor, rows: Rows) -> ExpertChoices:
        """The choices for these rows. `sample_numbers` [B, S]: the sample whose token a position holds; -1 means none.

        Raises InvalidArgument that names the sample whose column is missing or not of this model.
        """
        sample_numbers, positions = rows.own(sample_numbers, NOBODY), rows.positions.cpu()
        found = torch.full((*sample_numbers.shape, self.num_layers, self.experts.topk), FREE, dtype=torch.int64)
        for number, sample in enumerate(samples):
            mine = sample_numbers == number
            found[mine] = self._column(sample)[positions[mine]]
        by_layer = found.transpose(0, 1).flatten(0, 1).transpose(0, 1).contiguous().to(rows.tokens.device)
        return ExpertChoices({layer: by_layer[layer] for layer in self._layers})

    def check(self, sample: Sample) -> None:
        """Raises InvalidArgument when its column is missing or not of this model."""
        self._column(sample)

    @property
    def _layers(self) -> list[int]:
        return [layer for layer in range(self.num_layers) if self.experts.in_layer(layer)]

    def _column(self, sample: Sample) -> Tensor:
        column = sample.columns.get(ROUTED_EXPERTS)
        expected = (len(sample.tokens) - 1, self.num_layers, self.experts.topk)
        if column is None or column.shape != expected:
            found = "none" if column is None else str(list(column.shape))
            raise InvalidArgument(
                f"sample {sample.sample_id} has no {ROUTED_EXPERTS} of shape {list(expected)} (found {found}): "
                "--use-rollout-routing-replay makes engines return them, a generate function of your own sets "
                "sample.rollout_routed_experts"
            )
        known = torch.from_numpy(column.astype("int64"))
        ordered = known[:, self._layers].sort(-1).values
        is_free = (ordered == FREE).all(-1)
        is_choice = (ordered >= 0).all(-1) & (ordered < self.experts.count).all(-1) & (ordered.diff() > 0).all(-1)
        if not (is_free | is_choice).all():
            token, layer = (~(is_free | is_choice)).nonzero()[0].tolist()
            raise InvalidArgument(
                f"sample {sample.sample_id}: {ROUTED_EXPERTS} of token {token}, layer {self._layers[layer]} is "
                f"{known[token, self._layers[layer]].tolist()}, not {self.experts.topk} of the model's "
                f"{self.experts.count} experts"
            )
        return known
