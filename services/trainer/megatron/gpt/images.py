"""Images in a GPTModel: embeddings of a vision tower in the place of image tokens, and angles of their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from headrace.models.architecture import Vision
from services.trainer.megatron.gpt.hidden_states import RotaryAtPositions
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.images import RowImages, SampleImages
from services.trainer.plan.rows import NOBODY

Tower = Callable[[Sequence[SampleImages]], Tensor]
"""[embeddings of all images, H], without gradients."""


class ImagePlaces:
    """Puts the images of a micro-batch into a model's passes. `enter` says which micro-batch comes next.

    `tower` is None on ranks without the first stage.
    """

    def __init__(self, stages: Sequence[GPTModel], vision: Vision, tower: Tower | None, layout: Layout) -> None:
        self._sections = tuple(vision.rotary_sections)
        self._tower = tower
        self._layout = layout
        self._current: RowImages | None = None
        for stage in stages:
            for module in stage.modules():
                if isinstance(module, RotaryAtPositions):
                    module.axes = self._axes
            if stage.pre_process:
                stage.embedding.register_forward_hook(self._put)

    def enter(self, images: RowImages | None) -> None:
        """The next forward pass is of this micro-batch; None: of text alone."""
        self._current = images

    def _axes(self) -> tuple[Tensor, Sequence[int]] | None:
        return None if self._current is None else (self._current.axes, self._sections)

    def _put(self, module: torch.nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        """[S, B, H], or this tensor rank's part of S with sequence parallelism."""
        current = self._current
        if current is None or not current.images or self._tower is None:
            return embedded
        slots = current.slots.transpose(0, 1)
        if len(slots) != len(embedded):
            slots = slots.chunk(self._layout.tp_size)[self._layout.tp_rank]
        features = self._tower(current.images).to(embedded.dtype)
        return torch.where((slots == NOBODY)[..., None], embedded, features[slots.clamp(min=0)])
