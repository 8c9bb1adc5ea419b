"""Gives a value of every rank, or of rank 0, to all ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from services.trainer.megatron.parallel import Layout


def gathered(mine: Any, layout: Layout) -> list[Any]:
    """Collective over all ranks: what each of them gave, as JSON, in the order of the ranks."""
    text = json.dumps(mine).encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=layout.device) for _ in range(layout.world_size)]
    dist.all_gather(sizes, torch.tensor([len(text)], dtype=torch.int64, device=layout.device))
    longest = max(int(size) for size in sizes)
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=layout.device)
    texts = [torch.empty_like(padded) for _ in range(layout.world_size)]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(each.tolist())) for each in texts]


def told(mine: bytes, layout: Layout) -> bytes:
    """Collective over all ranks: what rank 0 gave; what others give is not looked at."""
    size = torch.tensor([len(mine)], dtype=torch.int64, device=layout.device)
    dist.broadcast(size, src=0)
    content = torch.empty(int(size), dtype=torch.uint8, device=layout.device)
    if layout.rank == 0:
        content.copy_(torch.from_numpy(np.frombuffer(mine, np.uint8).copy()))
    dist.broadcast(content, src=0)
    return content.cpu().numpy().tobytes()
