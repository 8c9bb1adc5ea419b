"""The images of a micro-batch: each token's place in an image, and which embedding stands in its stead."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from headrace.images.columns import IMAGE_GRIDS, PIXEL_VALUES, image_starts
from headrace.models.architecture import Vision
from headrace.trajectory import Sample
from services.trainer.plan.rows import NOBODY, Rows


@dataclass(frozen=True, eq=False)
class SampleImages:
    """All images of one sample, on the CPU."""

    pixels: NDArray[np.float32]
    """[patches, numbers of a patch]"""
    grids: NDArray[np.int64]
    """[images, 3]"""

    @cached_property
    def digest(self) -> bytes:
        """Names these images among others."""
        return hashlib.sha256(self.grids.tobytes() + self.pixels.tobytes()).digest()


@dataclass(frozen=True, slots=True, eq=False)
class RowImages:
    """The images of rows [B, S], and the positions for a model with a vision tower."""

    axes: Tensor
    """int64 [3, B, S]: each token's place in time, from the top and from the left; alike for a token of text"""
    slots: Tensor
    """int64 [B, S]: the embedding that stands at a position, counted over all images; -1: the token's own"""
    images: Sequence[SampleImages]
    """The pixels of the samples whose images are in these rows"""

    def aligned(self, size: int) -> RowImages:
        """S made longer, with positions that hold nothing."""
        missing = size - self.slots.shape[1]
        if not missing:
            return self
        return RowImages(pad(self.axes, (0, missing)), pad(self.slots, (0, missing), value=NOBODY), self.images)


def row_images(samples: Sequence[Sample], sample_numbers: Tensor, rows: Rows, vision: Vision) -> RowImages:
    """The images in these rows. `sample_numbers` [B, S]: the sample whose token a position holds; -1 means none.

    Raises InvalidArgument for a sample whose images and tokens contradict each other.
    """
    sample_numbers, positions = rows.own(sample_numbers, NOBODY), rows.positions.cpu()
    axes = torch.zeros((3, *sample_numbers.shape), dtype=torch.int64)
    slots = torch.full(sample_numbers.shape, NOBODY)
    images: list[SampleImages] = []
    num_slots = 0
    for number, sample in enumerate(samples):
        mine = sample_numbers == number
        sample_axes, sample_slots = _places(sample, vision)
        axes[:, mine] = sample_axes[:, positions[mine]]
        wanted = sample_slots[positions[mine]]
        if (wanted != NOBODY).any():
            slots[mine] = torch.where(wanted == NOBODY, NOBODY, wanted + num_slots)
            images.append(SampleImages(sample.columns[PIXEL_VALUES], sample.columns[IMAGE_GRIDS]))
            num_slots += int(sample_slots.max()) + 1
    device = rows.tokens.device
    return RowImages(axes.to(device), slots.to(device), images)


def _places(sample: Sample, vision: Vision) -> tuple[Tensor, Tensor]:
    """[3, T] and [T]. Text goes on behind an image's longest side (M-RoPE, https://arxiv.org/abs/2409.12191)."""
    length = len(sample.tokens)
    axes, slots = np.empty((3, length), dtype=np.int64), np.full(length, NOBODY, dtype=np.int64)
    at = following = num_slots = 0
    for start, grid in image_starts(f"sample {sample.sample_id}:", vision, sample.tokens, sample.columns):
        axes[:, at:start] = np.arange(following, following + start - at)
        following += start - at
        size = grid[0] * grid[1] * grid[2]
        at = start + size
        axes[:, start:at] = np.indices(grid).reshape(3, size) + following
        slots[start:at] = np.arange(num_slots, num_slots + size)
        num_slots += size
        following += max(grid[1:])
    axes[:, at:] = np.arange(following, following + length - at)
    return torch.from_numpy(axes), torch.from_numpy(slots)
