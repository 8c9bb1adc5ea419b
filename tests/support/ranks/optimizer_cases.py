"""What a spawned rank does in the tests of the optimizer's flags: two steps of one matrix, with given gradients.

weights.json   the matrix after both, row by row, or error.txt with the class of what ended it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.job.megatron.arguments import megatron
from headrace.job.schema.job import Job
from tests.support.ranks.ranks import entries

START = np.linspace(-1.0, 1.0, 12).reshape(3, 4)
GRADIENTS = (np.linspace(0.5, -2.0, 12).reshape(3, 4), np.linspace(-0.1, 0.3, 12).reshape(3, 4))


@dataclass(frozen=True)
class OptimizerCase:
    """Megatron's arguments of a job that trains nothing but a matrix."""

    name: str
    folder: str
    megatron: Mapping[str, Any]
    nan: bool = False
    """The first gradient is not a number, and goes the way of all gradients."""

    @property
    def out(self) -> Path:
        """Where its results are."""
        return Path(self.folder) / self.name

    def job(self) -> Job:
        """The job it stands for."""
        return Job.model_validate({"model": {"hf_checkpoint": self.folder}, "megatron": dict(self.megatron)})


def run_case(case: OptimizerCase) -> None:
    """In the rank."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from services.trainer.megatron.optimizer import Optimizer, wrap_for_data_parallel
    from services.trainer.model.build import join_ranks

    case.out.mkdir(parents=True)
    join_ranks(case.job())
    try:
        args = megatron(case.job().megatron)
        network = torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16 if args.bf16 else torch.float32)
        network.weight.data.copy_(torch.from_numpy(START))
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
        wrapped = wrap_for_data_parallel(config, args, [network])  # type: ignore[list-item]  # any module will do
        optimizer = Optimizer(args, wrapped, 10)
        for gradient in GRADIENTS:
            wrapped[0].zero_grad_buffer()
            optimizer.zero_grad()
            vars(network.weight)["main_grad"].copy_(torch.from_numpy(gradient) * (float("nan") if case.nan else 1.0))
            wrapped[0].start_grad_sync()
            wrapped[0].finish_grad_sync()
            optimizer.step()
        dtype = str(vars(network.weight)["main_grad"].dtype)
        (case.out / "weights.json").write_text(json.dumps({"weights": network.weight.tolist(), "gradients": dtype}))
    except RuntimeError as error:
        (case.out / "error.txt").write_text(str(error))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main(script: Path) -> None:
    """The cases of a script, one after the other."""
    for entry in entries(script):
        run_case(OptimizerCase(**entry))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
