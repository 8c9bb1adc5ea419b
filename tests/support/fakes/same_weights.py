"""The part of a Policy that its senders need: a checkpoint's weights, in a process that is all ranks by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist

from headrace.models.folders import QuantizedForm
from headrace.publication import TensorSpec
from services.trainer.hugging_face.export import Look, Write, export
from services.trainer.megatron.parallel import Layout
from services.trainer.weights.quantization import quantized, quantized_specs

ALONE = cast(Layout, SimpleNamespace(device=torch.device("cpu"), rank=0, pp_rank=0, pp_size=1, tp_rank=0, dp_rank=0))


class SameWeights:
    """The same weights in every publication, unless somebody moves them; `checkpoint` is the folder they began as."""

    def __init__(self, weights: Mapping[str, torch.Tensor], checkpoint: Path) -> None:
        self._weights = weights
        self._checkpoint = checkpoint

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.items()

    def hf_tensor_specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._weights.items()
        ]

    def export(
        self, folder: Path, file_bytes: int, look: Look, write: Write | None = None, form: QuantizedForm | None = None
    ) -> None:
        """As a Policy does; inside `all_ranks`."""
        tensors, specs = self.hf_tensors(), self.hf_tensor_specs()
        if form is not None:
            tensors, specs = quantized(form, tensors), quantized_specs(form, specs)
        export(tensors, specs, self._checkpoint, folder, ALONE, file_bytes, look, write)


@contextmanager
def all_ranks() -> Iterator[None]:
    """Collectives of this process with itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
