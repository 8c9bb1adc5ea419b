"""What an engine must print for weights that it was sent, written independently of the trainer's own code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch

_EXPERT = re.compile(r"experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def engine_checksums(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """As SGLang's /weights_checker prints them: what it fuses is one tensor each, and so are a layer's experts."""
    fused: dict[str, dict[tuple[int, int], bytes]] = {}
    for name, tensor in weights.items():
        whole, place = _fused(name)
        fused.setdefault(whole, {})[place] = flat_bytes(tensor).numpy().tobytes()
    wholes = {name: b"".join(parts[place] for place in sorted(parts)) for name, parts in fused.items()}
    return {name: hashlib.sha256(whole).hexdigest()[:16] for name, whole in wholes.items()}


def stood_for(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns block FP8 multiplied out, in bfloat16, and all else as it is."""
    found = {}
    for name, tensor in weights.items():
        if (factors := weights.get(f"{name}_scale_inv")) is not None:
            side = tensor.shape[1] // factors.shape[1]
            spread = torch.kron(factors, torch.ones(side, side))[: tensor.shape[0]]
            tensor = (tensor.float() * spread).bfloat16()
        if not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


def _fused(name: str) -> tuple[str, tuple[int, int]]:
    """The engine's name, and where the tensor is in it: number of the expert, number of the part."""
    if expert := _EXPERT.search(name):
        number, part = int(expert[1]), ("gate", "up", "down").index(expert[2])
        return name[: expert.start()] + ("experts.w2_weight" if part == 2 else "experts.w13_weight"), (number, part)
    for fused, members in _FUSED.items():
        for part, member in enumerate(members):
            if f".{member}." in name:
                return name.replace(member, fused), (0, part)
    return name, (0, 0)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
