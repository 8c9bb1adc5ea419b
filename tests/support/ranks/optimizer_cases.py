"""What a spawned rank does in the tests of the optimizer's flags: two steps of one matrix, with given gradients.

weights.json   the matrix after both, row by row, or error.txt with the class of what ended it
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from headrace.job.megatron import megatron
from tests.support.ranks.ranks import RankCase

START = np.linspace(-1.0, 1.0, 12).reshape(3, 4)
GRADIENTS = (np.linspace(0.5, -2.0, 12).reshape(3, 4), np.linspace(-0.1, 0.3, 12).reshape(3, 4))


@dataclass(frozen=True)
class OptimizerCase(RankCase):
    """Megatron's arguments of a job that trains nothing but a matrix."""

    nan: bool = False
    """The first gradient is not a number, and goes the way of all gradients."""

    def run(self) -> None:
        """On a CPU, what the job offloads counts as a GPU's."""
        from tests.support.ranks.offloading import offloading

        with offloading():
            self._run()

    def _run(self) -> None:
        import torch
        from megatron.core.transformer.transformer_config import TransformerConfig

        from services.trainer.megatron.optimizer import Optimizer, wrap_for_data_parallel
        from services.trainer.model.build import join_ranks

        self.out.mkdir(parents=True)
        join_ranks(self.job())
        args = megatron(self.job().megatron)
        network = torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16 if args.bf16 else torch.float32)
        network.weight.data.copy_(torch.from_numpy(START))
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
        wrapped = wrap_for_data_parallel(config, args, [network])  # type: ignore[list-item]  # any module will do
        optimizer = Optimizer(args, wrapped, 10)
        try:
            for gradient in GRADIENTS:
                wrapped[0].zero_grad_buffer()
                optimizer.zero_grad()
                given = torch.from_numpy(gradient) * (float("nan") if self.nan else 1.0)
                vars(network.weight)["main_grad"].copy_(given)
                wrapped[0].start_grad_sync()
                wrapped[0].finish_grad_sync()
                optimizer.step()
        except RuntimeError as error:
            (self.out / "error.txt").write_text(str(error))
        dtype = str(vars(network.weight)["main_grad"].dtype)
        (self.out / "weights.json").write_text(json.dumps({"weights": network.weight.tolist(), "gradients": dtype}))
