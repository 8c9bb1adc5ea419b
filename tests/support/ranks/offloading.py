"""Megatron-core's offloaded optimizer on a CPU: parameters count as a GPU's, and its copies as the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from services.trainer.megatron import configs

FLAGS = {
    "optimizer_cpu_offload": True,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "pin_cpu_grads": False,  # torch without a GPU pins nothing
}
_groups = HybridDeviceOptimizer._get_sub_optimizer_param_groups


def _groups_as_on_a_gpu(self: HybridDeviceOptimizer, offload_fraction: float) -> Any:
    """A model's parameters and runs of them are views of its buffers; copies are not."""
    is_ours = property(lambda tensor: isinstance(tensor, torch.nn.Parameter) or tensor._is_view())
    with patch.object(torch.Tensor, "is_cuda", is_ours):
        return _groups(self, offload_fraction)


@contextmanager
def offloading() -> Iterator[None]:
    """Optimizers that are made in the block are offloaded where their flags say so."""
    with (
        patch.object(configs, "OPTIMIZER_ON_GPU", frozenset()),  # on a CPU they are left out
        patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        patch.object(optimizer_config, "is_te_min_version", lambda *_: True),  # although offloaded states are torch's
        patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", _groups_as_on_a_gpu),
    ):
        yield
