"""Context parallelism: several ranks hold parts of the same rows, and each computes what its own positions need.

Megatron is not told. To it these ranks are data-parallel: gradients are summed over all of them, optimizer shards and
replicas are divided as ever. A rank's queries see the keys of the whole row, gathered in every layer (as Llama 3 was
trained, https://arxiv.org/abs/2407.21783 §3.3.2), and what the parts predict is put together before the loss, which
every rank of the group computes whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from services.trainer.plan.rows import Rows, RowSegment, Share


@dataclass(frozen=True, slots=True)
class Context:
    """This rank's place in its context group."""

    rank: int
    size: int
    group: dist.ProcessGroup
    multiple: int = 1
    """Each part's length is a multiple of it: sequence parallelism divides it further."""

    def part(self, rows: Rows, logit_positions: Tensor, target_slots: Tensor) -> tuple[Rows, Tensor, Tensor]:
        """This rank's positions of a single packed row, and those of them that predict a token.

        `logit_positions` [N] become positions in the part; `target_slots` [N] say as before which target each predicts.
        """
        if self.size == 1:
            return rows, logit_positions, target_slots
        row = _with_segments(rows).aligned(2 * self.size * self.multiple)
        chunk = row.tokens.shape[1] // (2 * self.size)
        device = logit_positions.device
        everywhere = [_positions(self._spans(rank, chunk), device) for rank in range(self.size)]
        own = everywhere[self.rank]
        here = torch.full((row.tokens.shape[1],), -1, dtype=torch.int64, device=device)
        here[own] = torch.arange(len(own), device=device)
        found = here[logit_positions]
        mine = found >= 0
        share = Share(self._spans(self.rank, chunk), torch.cat(everywhere).argsort(), self.group)
        part = Rows(row.tokens[:, own], row.positions[:, own], row.segments, share)
        return part, found[mine], target_slots[mine]

    def total(self, part: Tensor) -> Tensor:
        """The sum over the group; its gradient reaches every rank's part as it is."""
        if self.size == 1:
            return part
        total: Tensor = reduce_from_tensor_model_parallel_region(part, group=self.group)
        return total

    def _spans(self, rank: int, chunk: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """One chunk from either end of the row: late positions see more keys, so that all ranks work alike."""
        first, last = rank * chunk, (2 * self.size - 1 - rank) * chunk
        return (first, first + chunk), (last, last + chunk)


def _positions(spans: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, end, device=device) for start, end in spans])


def _with_segments(rows: Rows) -> Rows:
    """A row of one sample is one segment."""
    if rows.segments is not None:
        return rows
    assert len(rows.tokens) == 1  # the rules refuse padded batches
    return Rows(rows.tokens, rows.positions, (RowSegment(0, rows.tokens.shape[1]),))
