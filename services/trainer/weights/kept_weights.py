"""A copy of the served weights in host memory, from which they can be sent again while the model has newer ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


class KeptWeights:
    """Its memory is made with the first copy and used for all further ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, torch.Tensor] = {}

    def keep(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the place of what was kept before."""
        for name, tensor in tensors:
            if name not in self._kept:
                self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._kept[name].copy_(tensor.detach())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors in the order in which they were kept, on the device from which they are sent."""
        return ((name, tensor.to(self._device)) for name, tensor in self._kept.items())
