"""The two matrices of one adapter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from headrace.models.rows import HfTensor


@dataclass(frozen=True, slots=True)
class Pair:
    """Whole matrices of one Hugging Face layer."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""


class LowRank(nn.Module):
    """This tensor rank's shards of a pair, under peft's names."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(a)
        self.lora_B = nn.Parameter(b)

    def delta(self) -> Tensor:
        """[in, out] in float32: what it adds to the transposed weight, before it is scaled."""
        product: Tensor = (self.lora_B.detach().float() @ self.lora_A.detach().float()).T
        return product


def pair_shapes(weight: HfTensor, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of A and B for a layer with this weight."""
    size_out, size_in = weight.shape
    return (rank, size_in), (size_out, rank)
