"""The fused tensors in which an engine holds what a checkpoint holds apart, and the checksum it prints over them.

SGLang fuses q/k/v and gate/up into one parameter each, by concatenation along the output dimension, and stacks a
layer's experts, so the bytes of the fused tensor are the parts' bytes end to end. Its /weights_checker prints, for a
CPU tensor, the first eight bytes of the SHA-256 over the raw bytes, in hexadecimal (sglang/srt/managers/mm_utils.py:
tensor_hash), and for one on a GPU its own kernel's hash (`DeviceHash`). Of a weight in block FP8 it hashes quantized ×
factor, in bfloat16 (sglang/srt/utils/weight_checker_comparator.py). INT4 it repacks for its kernels: no checksum of
those can be said here.

`DeviceHash` is written from SGLang's kernel (sglang/kernels/ops/memory/gpu_tensor_hash.py): each 32-bit word is mixed
with its place, words are added up in tiles of 8192, and the mixed tiles to 64 bits. torch has no unsigned arithmetic
on all devices: words are int64, of which the lower 32 bits count.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from headrace.models import packed_int4
from headrace.models.folders import SCALE
from services.trainer.weights.quantization import dequantized

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


_INT4 = tuple(f".weight{end}" for end in (packed_int4.PACKED, packed_int4.SCALE, packed_int4.SHAPE))
_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w[123])\.weight(_scale_inv)?$")
_STACKED = dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), ".experts.w13_weight")
_STACKED |= dict.fromkeys(("down_proj", "w2"), ".experts.w2_weight")
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
}


def engine_name(hf_name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight → model.layers.0.self_attn.qkv_proj.weight; others as they are.

    A decoder beside a vision tower (model.language_model) has the names of a model of text alone.
    """
    hf_name = hf_name.replace("model.language_model.", "model.", 1)
    if expert := _EXPERT.search(hf_name):
        return hf_name[: expert.start()] + _STACKED[expert[1]] + (expert[2] or "")
    return ".".join(_FUSED.get(part, part) for part in hf_name.split("."))


def travel_together(first: str, second: str) -> bool:
    """Two parts that SGLang fuses while it loads, keeping the first only until the end of that call."""
    fused = engine_name(first.removesuffix(SCALE))
    return fused == engine_name(second.removesuffix(SCALE)) and fused.endswith(".fused_qkv_a_proj_with_mqa.weight")


class EngineChecksums:
    """Checksums of an engine's tensors, from a checkpoint's in one pass; parts of a fused tensor come in order."""

    def __init__(self) -> None:
        self._hashers: dict[str, _Sha256 | DeviceHash] = {}
        self._quantized: dict[str, torch.Tensor] = {}
        """Weights whose factors come next."""

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes in (Hugging Face name, tensor) pairs."""
        for name, tensor in tensors:
            if name.endswith(_INT4):
                continue
            if tensor.dtype == torch.float8_e4m3fn:
                self._quantized[name] = tensor
            elif (weight := self._quantized.pop(name.removesuffix(SCALE), None)) is not None:
                self._hash(name.removesuffix(SCALE), dequantized(weight, tensor, _block(weight, tensor)).bfloat16())
            else:
                self._hash(name, tensor)

    def _hash(self, name: str, tensor: torch.Tensor) -> None:
        fused = engine_name(name)
        if fused not in self._hashers:
            self._hashers[fused] = _Sha256() if tensor.device.type == "cpu" else DeviceHash(tensor.device)
        self._hashers[fused].update(flat_bytes(tensor))

    def result(self) -> dict[str, str]:
        """Engine name → checksum, as /weights_checker prints it."""
        return {name: hasher.hexdigest() for name, hasher in self._hashers.items()}


class _Sha256:
    """The checksum of a CPU tensor, whose bytes come in parts, in order."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()

    def update(self, part: torch.Tensor) -> None:
        """Takes in uint8, shape [bytes]."""
        self._hasher.update(part.numpy().data)

    def hexdigest(self) -> str:
        """16 hexadecimal digits, once nothing more comes."""
        return self._hasher.hexdigest()[:16]


def _block(weight: torch.Tensor, factors: torch.Tensor) -> tuple[int, int]:
    """A square block, as the engine concludes it; `quantized_specs` refuses weights of which that cannot be said."""
    side = weight.shape[1] // factors.shape[1]
    return side, side


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in C order: uint8, shape [bytes]."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


_HASHED_LATER_BYTES = 1 << 30
"""Tensors that are used before they are hashed stay in memory until then."""


class Hashing:
    """The checksums of one publication; `thread` has one worker, because parts of a tensor come in order."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._checksums = EngineChecksums()
        self._running: deque[tuple[Future[None], int]] = deque()
        self._waiting_bytes = 0

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Takes in (Hugging Face name, tensor) pairs, which must stay as they are until they are hashed."""
        num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        self._running.append((self._thread.submit(self._checksums.update, tensors), num_bytes))
        self._waiting_bytes += num_bytes
        while self._waiting_bytes > _HASHED_LATER_BYTES:
            self._wait()

    def result(self) -> dict[str, str]:
        """Engine name → checksum, once all of it is hashed."""
        while self._running:
            self._wait()
        return self._checksums.result()

    def cancel(self) -> None:
        """Leaves unhashed what is waiting: nobody asks for the result."""
        for hashed, _ in self._running:
            hashed.cancel()

    def _wait(self) -> None:
        hashed, num_bytes = self._running.popleft()
        self._waiting_bytes -= num_bytes
        hashed.result()
