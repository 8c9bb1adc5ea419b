"""On a GPU the trainer's checksum is that of the engine's kernel, which SGLang must be installed for."""

from __future__ import annotations

import pytest
import torch

from services.trainer.weights.engine_layout import EngineChecksums

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 127, 100_000])
def test_the_checksum_of_a_cuda_tensor_is_the_engines(dtype: torch.dtype, rows: int) -> None:
    kernel = pytest.importorskip("sglang.kernels.ops.memory.gpu_tensor_hash")
    parts = {f"l.0.mlp.{name}_proj.weight": torch.randn(rows, 576, device="cuda").to(dtype) for name in ("gate", "up")}
    sums = EngineChecksums()
    sums.update(parts.items())
    fused = torch.cat(list(parts.values()))
    assert sums.result() == {"l.0.mlp.gate_up_proj.weight": f"{kernel.gpu_tensor_hash(fused):016x}"}
