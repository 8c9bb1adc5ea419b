"""The checksum that an engine on a GPU prints for a tensor, computed on the device where the tensor is.

Written from SGLang's kernel (sglang/kernels/ops/memory/gpu_tensor_hash.py): each 32-bit word is mixed with its place,
words are added up in tiles of 8192, and the mixed tiles to 64 bits. torch has no unsigned arithmetic on all devices:
words are int64, of which the lower 32 bits count.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE = 8192
_AT_ONCE = 256 * _TILE  # words: some 16 MB for each intermediate result
_LOWER = 0xFFFFFFFF
_LOWER_64 = (1 << 64) - 1
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_SEED = 0x243F6A88
_PLACES = (
    (0x27D4EB2D, _SEED, 15),
    (0x165667B1, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _LOWER, 13),
)
"""Factor, seed and rotation of a word's place, for each half of the checksum."""


class DeviceHash:
    """The checksum of one tensor, whose bytes come in parts, in order."""

    def __init__(self, device: torch.device) -> None:
        self._tiles = torch.zeros((len(_PLACES), 0), dtype=torch.int64, device=device)
        self._rest = torch.empty(0, dtype=torch.uint8, device=device)
        """Fewer bytes than a word."""
        self._num_words = 0

    def update(self, part: Tensor) -> None:
        """Takes in uint8, shape [bytes]."""
        data = torch.cat([self._rest, part]) if self._rest.numel() else part
        whole = data.numel() // 4 * 4
        self._rest = data[whole:].clone()
        self._add(data[:whole])

    def hexdigest(self) -> str:
        """16 hexadecimal digits, once nothing more comes."""
        if self._rest.numel():
            self._add(torch.nn.functional.pad(self._rest, (0, 4 - self._rest.numel())))
            self._rest = self._rest[:0]
        if not self._num_words:
            return f"{0:016x}"
        first, second = (_mixed((half & _LOWER) ^ (4 * self._num_words & _LOWER)) for half in self._tiles)
        return f"{_mixed_64(int(((first << 32) | second).sum().item()) & _LOWER_64):016x}"

    def _add(self, data: Tensor) -> None:
        words = data.view(torch.int32) if data.storage_offset() % 4 == 0 else data.clone().view(torch.int32)
        for some in words.split(_AT_ONCE):
            self._add_words(some.to(torch.int64) & _LOWER)

    def _add_words(self, words: Tensor) -> None:
        places = torch.arange(self._num_words, self._num_words + words.numel(), device=words.device)
        self._num_words += words.numel()
        missing = -(-self._num_words // _TILE) - self._tiles.shape[1]
        self._tiles = torch.nn.functional.pad(self._tiles, (0, missing))
        tiles, places = places // _TILE, places & _LOWER
        for half, (factor, seed, turn) in enumerate(_PLACES):
            turned = ((places << turn) | (places >> (32 - turn))) & _LOWER
            self._tiles[half].index_add_(0, tiles, _mixed(words ^ (((places * factor + seed) & _LOWER) ^ turned)))


def _mixed(words: Tensor) -> Tensor:
    """The last step of MurmurHash3, of 32 bits in each int64."""
    words = words ^ (words >> 16)
    words = (words * _MIX[0]) & _LOWER
    words = words ^ (words >> 13)
    words = (words * _MIX[1]) & _LOWER
    return words ^ (words >> 16)


def _mixed_64(number: int) -> int:
    """The last step of SplitMix64."""
    number ^= number >> 30
    number = number * 0xBF58476D1CE4E5B9 & _LOWER_64
    number ^= number >> 27
    number = number * 0x94D049BB133111EB & _LOWER_64
    return number ^ (number >> 31)
