"""The trainer's side of a publication, small: joins the engines' group as rank 0 and broadcasts flattened buckets."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

_TIMEOUT = datetime.timedelta(seconds=60)
_EXPERT = re.compile(r"experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


class TorchSender:
    """One collective group; `join` and `send` block, so call them from a thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        self._group: dist.ProcessGroup | None = None

    @property
    def port(self) -> int:
        return int(self._store.port)

    def join(self, world_size: int) -> None:
        self._group, _ = _new_process_group_helper(
            world_size,
            0,
            [],
            Backend("gloo"),
            dist.PrefixStore(self.name, self._store),
            group_name=self.name,
            backend_options=None,
            timeout=_TIMEOUT,
        )

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank = 0
        flat = torch.cat([_flat_bytes(t) for t in tensors])
        self._group.broadcast([flat], options).wait(_TIMEOUT)


def engine_checksums(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """As SGLang's /weights_checker prints them: what it fuses is one tensor each, and so are a layer's experts."""
    fused: dict[str, dict[tuple[int, int], bytes]] = {}
    for name, tensor in weights.items():
        whole, place = _fused(name)
        fused.setdefault(whole, {})[place] = _flat_bytes(tensor).numpy().tobytes()
    wholes = {name: b"".join(parts[place] for place in sorted(parts)) for name, parts in fused.items()}
    return {name: hashlib.sha256(whole).hexdigest()[:16] for name, whole in wholes.items()}


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


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
