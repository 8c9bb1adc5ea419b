"""The adapters of one linear layer of Megatron, which may be several layers of Hugging Face's.

A column-parallel layer has all of A on every tensor rank, and its own rows of B: the middle, A·x, is the same
everywhere, and its gradient is a sum over ranks. A row-parallel layer has its own columns of A, and all of B: the
middle is a sum. With sequence parallelism the middle is gathered, or scattered, as its input and output are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from headrace.models.rows import FusedGateUp, GateUp, QueryKeyValue, Replicated, Sharding, Split
from services.trainer.model.lora.dropout import SlicedDropout
from services.trainer.model.lora.low_rank import LowRank

Exchange = Callable[[Tensor], Tensor]


class Adapter(nn.Module):
    """`parts` are those of the layer's Hugging Face tensors, in the table's order; None for one without an adapter.

    `sizes` are the outputs of each part on this rank.
    """

    def __init__(
        self,
        sharding: Sharding,
        parts: Sequence[LowRank | None],
        sizes: Sequence[int],
        scale: float,
        dropout: SlicedDropout,
        exchange: Exchange,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part or nn.Identity() for part in parts)
        self._sharding = sharding
        self._sizes = sizes
        self._scale = scale
        self._dropout = dropout
        self._exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        """Takes the layer's input and returns what is added to its output."""
        return self._arranged([self._output(part, x) for part in self.parts])

    def delta(self) -> Tensor:
        """Returns what is added to this rank's shard of the weight, in its shape and in float32."""
        return self._arranged([part.delta() if isinstance(part, LowRank) else None for part in self.parts]).T

    def _output(self, part: nn.Module, x: Tensor) -> Tensor | None:
        if not isinstance(part, LowRank):
            return None
        x = self._dropout(x) if self.training else x
        middle = self._exchange(nn.functional.linear(x, part.lora_A))
        return nn.functional.linear(middle, part.lora_B)

    def _arranged(self, outputs: Sequence[Tensor | None]) -> Tensor:
        """[…, out of all parts] in Megatron's order, scaled; 0 where a part has no adapter."""
        like = next(output for output in outputs if output is not None)
        whole = [
            like.new_zeros(*like.shape[:-1], size) if output is None else output
            for output, size in zip(outputs, self._sizes, strict=True)
        ]
        return arranged(self._sharding, whole) * self._scale


def arranged(sharding: Sharding, parts: Sequence[Tensor]) -> Tensor:
    """Outputs of Hugging Face layers in the order in which Megatron's layer has them; the last dimension is theirs."""
    match sharding:
        case QueryKeyValue(_, _, head_size):
            groups = parts[1].shape[-1] // head_size
            return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], dim=-1).flatten(-2)
        case GateUp():
            return torch.cat(list(parts), dim=-1)
        case _:
            return parts[0]


def is_row_parallel(sharding: Sharding) -> bool:
    """True where tensor ranks divide the layer's input."""
    return isinstance(sharding, Split) and sharding.dim == 1


def pair_shardings(sharding: Sharding) -> tuple[Sharding, Sharding]:
    """Returns how tensor ranks divide A and B of a layer: one of the two is whole on each."""
    if is_row_parallel(sharding):
        return Split(1), Replicated()
    return Replicated(), sharding if isinstance(sharding, FusedGateUp) else Split(0)


def exchange_of(sharding: Sharding, *, sequence_parallel: bool) -> Exchange:
    """Returns what tensor ranks do with the middle."""
    exchange: Exchange
    if is_row_parallel(sharding):
        scatter, reduce = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
        exchange = scatter if sequence_parallel else reduce
    elif sequence_parallel:
        exchange = partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=True)
    else:
        exchange = copy_to_tensor_model_parallel_region
    return exchange
