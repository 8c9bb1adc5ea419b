"""The fused tensors in which an engine holds what a checkpoint holds apart, and the checksum it prints over them.

SGLang fuses q/k/v and gate/up into one parameter each, by concatenation along the output dimension, and stacks a
layer's experts, so the bytes of the fused tensor are the parts' bytes end to end. Its /weights_checker prints, for a
CPU tensor, the first eight bytes of the SHA-256 over the raw bytes, in hexadecimal (sglang/srt/managers/mm_utils.py:
tensor_hash), and for one on a GPU its own kernel's hash (`device_hash`). Of a weight in block FP8 it hashes quantized ×
factor, in bfloat16 (sglang/srt/utils/weight_checker_comparator.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import torch

from headrace.models.block_fp8 import SCALE
from services.trainer.weights.dequantizing import dequantized
from services.trainer.weights.device_hash import DeviceHash

_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight(_scale_inv)?$")
_STACKED = {"gate": ".experts.w13_weight", "up": ".experts.w13_weight", "down": ".experts.w2_weight"}
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
    """model.layers.0.self_attn.q_proj.weight → model.layers.0.self_attn.qkv_proj.weight; others as they are."""
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
