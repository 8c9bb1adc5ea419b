"""A frozen policy (the reference, a teacher): a second set of weights that takes the model's place for a forward
pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel

from services.trainer.models.convert import Converter
from services.trainer.models.weights import weights_of


class ReferencePolicy:
    """Host copies of a Hugging Face folder's weights, or of the initial ones."""

    def __init__(self, model: DistributedDataParallel, converter: Converter, folder: Path | None) -> None:
        self._weights = weights_of(model.module)
        if folder is not None:
            current = self._copies()
            converter.load(folder)
            self._reference = self._copies()
            self._put(current)
        else:
            self._reference = self._copies()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model is the reference policy inside the block, and itself again after it."""
        current = self._copies()
        self._put(self._reference)
        try:
            yield
        finally:
            self._put(current)

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().cpu().clone() for name, weight in self._weights.items()}

    def _put(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._weights[name].copy_(value)
