"""Numbers that users' functions report under names of their own, added up over ranks that do not know the names."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist

from services.trainer.parallel import Layout


def summed_by_name(mine: Mapping[str, float], layout: Layout) -> dict[str, float]:
    """Collective over all ranks: the sum under each name that any rank has."""
    text = json.dumps(dict(mine)).encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=layout.device) for _ in range(layout.world_size)]
    dist.all_gather(sizes, torch.tensor([len(text)], dtype=torch.int64, device=layout.device))
    longest = max(int(size) for size in sizes)
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=layout.device)
    texts = [torch.empty_like(padded) for _ in range(layout.world_size)]
    dist.all_gather(texts, padded)
    found: dict[str, float] = defaultdict(float)
    for each in texts:
        for name, value in json.loads(bytes(each.tolist())).items():
            found[name] += value
    return dict(sorted(found.items()))
