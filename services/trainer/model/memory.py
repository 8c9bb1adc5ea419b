"""A rank's memory on its device, moved into the host's memory and back.

ON THE DEVICE ──to_host──► IN HOST MEMORY ──to_device──► ON THE DEVICE: the same bytes, and gradients as zeros.
Tensors and their views stay what they are: their storage is emptied in place and filled again, so nobody who has one
(Megatron's buffers, the optimizer, a checkpoint) notices. They may not be used in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, UntypedStorage

from headrace.rpc.log import log
from services.trainer.megatron.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A rank's chunks of a model that is trained, and their optimizer."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: Optimizer

    def tensors(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            yield from chunk.module.parameters()
            yield from chunk.module.buffers()
            yield from (each.param_data for each in _buffers(chunk) if each.param_data is not None)
        yield from self.optimizer.tensors()

    def gradients(self) -> Iterator[Tensor]:
        """They are cleared before each step, so nothing that is in them is needed."""
        for chunk in self.chunks:
            yield from (each.grad_data for each in _buffers(chunk))


@dataclass(frozen=True, slots=True)
class _Moved:
    """A storage that is empty. `content` is None for zeros."""

    storage: UntypedStorage
    num_bytes: int
    content: Tensor | None


class RankMemory:
    """All that a rank has on its device of the models that it trains: the policy, and the critic."""

    def __init__(self, device: torch.device, models: Sequence[TrainedModel]) -> None:
        self._device = device
        self._models = models
        self._moved: list[_Moved] = []
        self._pinned: dict[int, Tensor] = {}
        """Pages of the host by the storages' addresses: to allocate them costs more than to copy."""

    def to_host(self) -> None:
        """Does nothing where it is there already."""
        if self._moved:
            return
        gradients = _storages(self._device, (tensor for model in self._models for tensor in model.gradients()))
        others = _storages(self._device, (tensor for model in self._models for tensor in model.tensors()))
        kept = [storage for key, storage in others.items() if key not in gradients]
        self._moved = [_Moved(storage, storage.nbytes(), self._copied(storage)) for storage in kept]
        self._moved += [_Moved(storage, storage.nbytes(), None) for storage in gradients.values()]
        for each in self._moved:
            each.storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        log.info("memory_released", num_bytes=self._num_bytes)

    def to_device(self) -> None:
        """Does nothing where it is there already."""
        if not self._moved:
            return
        log.info("memory_taken", num_bytes=self._num_bytes)
        for each in self._moved:
            each.storage.resize_(each.num_bytes)
            whole = _whole(each.storage)
            if each.content is None:
                whole.zero_()
            else:
                whole.copy_(each.content)
        self._moved = []

    @property
    def _num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._moved)

    def _copied(self, storage: UntypedStorage) -> Tensor:
        if self._device.type != "cuda":
            return _whole(storage).clone()
        pinned = self._pinned.get(storage._cdata)
        if pinned is None or pinned.nbytes != storage.nbytes():
            pinned = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            self._pinned[storage._cdata] = pinned
        return pinned.copy_(_whole(storage))


def _storages(device: torch.device, tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type)
    return {storage._cdata: storage for storage in storages if storage.nbytes() and storage.resizable()}


def _whole(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _buffers(chunk: DistributedDataParallel) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]
