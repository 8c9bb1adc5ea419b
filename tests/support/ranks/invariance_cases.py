"""What a spawned rank does in the invariance test: under one layout, the same global batch is trained in every way.

For each way, in the folder named layout/way: metrics.json of a rollout step, and the updated weights as safetensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ranks.rank_cases import Case, train_once
from tests.support.ranks.ranks import entries

WAYS: Mapping[str, Mapping[str, Any]] = {
    f"{sizes}-{packing}": chosen | {"packing": packing}
    for sizes, chosen in {
        "static": {"micro_batch_size": 3},
        "dynamic": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48, "micro_batch_size": 1},
    }.items()
    for packing in ("padded", "packed", "shared_prompts")
}


def ways_of(megatron: Mapping[str, Any]) -> list[str]:
    """Those that a layout can train in: context parallelism divides packed rows only."""
    is_whole = megatron.get("context_parallel_size", 1) == 1
    return [way for way, chosen in WAYS.items() if is_whole or chosen["packing"] != "padded"]


@dataclass(frozen=True)
class LayoutCase:
    """One layout of one model."""

    name: str
    folder: str
    hf_checkpoint: str
    megatron: Mapping[str, Any]


def run_layout(case: LayoutCase) -> None:
    """In every rank at once; the process groups are made once."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from services.trainer.model.build import join_ranks, policy_of

    names = ways_of(case.megatron)
    ways = [Case(f"{case.name}/{way}", case.folder, case.hf_checkpoint, case.megatron, WAYS[way]) for way in names]
    layout = join_ranks(ways[0].job())
    for way in ways:
        policy = policy_of(way.job(), layout)
        metrics = train_once(policy, 0)
        way.out.mkdir(parents=True, exist_ok=True)
        policy.export(way.out / "weights")
        if layout.rank == 0:
            (way.out / "metrics.json").write_text(json.dumps(metrics))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    for entry in entries(Path(sys.argv[1])):
        run_layout(LayoutCase(**entry))
