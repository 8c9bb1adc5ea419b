"""The trainer's side of a publication, small: joins the engines' group as rank 0 and broadcasts flattened buckets."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

_TIMEOUT = datetime.timedelta(seconds=60)
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}


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
    """As SGLang's /weights_checker prints them: q/k/v and gate/up are one tensor each, in this order."""
    hashers: dict[str, hashlib._Hash] = {}
    for name, tensor in weights.items():
        fused = ".".join({**_FUSED, "up_proj": "gate_up_proj"}.get(part, part) for part in name.split("."))
        hashers.setdefault(fused, hashlib.sha256()).update(memoryview(_flat_bytes(tensor).numpy()))
    return {name: hasher.hexdigest()[:16] for name, hasher in hashers.items()}


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
