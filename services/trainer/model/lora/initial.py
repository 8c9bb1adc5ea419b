"""Adapters at the start of a run, as peft makes them: B is 0, so that the model is what it was."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from headrace.models.rows import HfTensor
from services.trainer.model.lora.low_rank import Pair, pair_shapes


@dataclass(frozen=True, slots=True)
class InitialPairs:
    """Random numbers of each layer depend on the seed and its name alone: not on the layout."""

    rank: int
    init: str
    """kaiming or gaussian"""
    seed: int

    def __call__(self, weight: HfTensor) -> Pair:
        """Float32 matrices of the layer that has this weight."""
        shape_a, shape_b = pair_shapes(weight, self.rank)
        a, random = torch.empty(shape_a), torch.Generator().manual_seed(self._seed_of(weight.name))
        if self.init == "gaussian":
            torch.nn.init.normal_(a, std=1 / self.rank, generator=random)
        else:
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=random)
        return Pair(a, torch.zeros(shape_b))

    def _seed_of(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big")
