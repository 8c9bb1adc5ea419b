"""Lays the samples of a micro-batch into the rows that go through the model, with their images and their experts.

padded: one sample a row, zeros behind it. packed: one row, sample after sample. shared_prompts: one row, and samples
of a group that begin with the same prompt follow a single copy of it, which each of them sees before itself. A causal
model computes the same for a token in all three, for what a token sees is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, assert_never

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from headrace.errors import InvalidArgument
from headrace.images import IMAGE_GRIDS, PIXEL_VALUES, image_starts
from headrace.models.architecture import Experts, Vision
from headrace.trajectory import ROUTED_EXPERTS, Sample

Packing = Literal["padded", "packed", "shared_prompts"]
Indices = NDArray[np.int64]
NOBODY = -1


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Positions [start, end) of a packed row: they see those of another segment, if there is one, and themselves."""

    start: int
    end: int
    prefix: int | None = None
    """Its number in the row"""

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a row that several hold together."""

    spans: Sequence[tuple[int, int]]
    """[start, end) in the whole row, in order and one behind the other here"""
    order: Tensor
    """int64 [T]: where each position of the row is when the ranks' shares lie one behind the other"""
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Rows:
    """B rows of S positions."""

    tokens: Tensor
    """int64 [B, S], token ids"""
    positions: Tensor
    """int64 [B, S]: each token's place in its own sample"""
    segments: Sequence[RowSegment] | None
    """The segments of the single row, in order and without gaps. None: padded, every row is one causal sequence."""
    share: Share | None = None
    """The positions of the single row that these tokens are; None: all. Segments are always the whole row's."""

    def to(self, device: torch.device) -> Rows:
        return Rows(self.tokens.to(device), self.positions.to(device), self.segments, self.share)

    def own(self, values: Tensor, filler: int) -> Tensor:
        """[B, S] of the whole rows to these positions'; `filler` where the row was made longer before it was shared."""
        if self.share is None:
            return values
        longer = pad(values, (0, len(self.share.order) - values.shape[1]), value=filler)
        return torch.cat([longer[:, start:end] for start, end in self.share.spans], dim=1)

    def aligned(self, multiple: int) -> Rows:
        """S made a multiple of it, with tokens that nothing sees behind the others: sequence parallelism divides S."""
        size = self.tokens.shape[1]
        missing = -size % multiple
        if not missing:
            return self
        tokens, positions = (pad(each, (0, missing)) for each in (self.tokens, self.positions))
        filler = () if self.segments is None else (*self.segments, RowSegment(size, size + missing))
        return Rows(tokens, positions, filler or None)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows, and for each sample where its response is predicted."""

    rows: Rows
    logit_positions: Sequence[Indices]
    """Per sample [R], or [R - 1] without a prompt: indices into the flattened rows."""
    sample_numbers: Tensor
    """int64 [B, S]: the number of the sample whose token a position holds; -1: nobody's. The first of those that share
    a prompt owns it."""


def pack(samples: Sequence[Sample], packing: Packing) -> PackedRows:
    """Packs at least one sample. A sample's last token is only predicted, so it is in no row."""
    match packing:
        case "padded":
            return _padded(samples)
        case "packed":
            return _packed([[sample] for sample in samples])
        case "shared_prompts":
            return _in_order(samples, [list(family) for family in _families(samples)])
        case _:
            assert_never(packing)


def row_tokens(lengths: Sequence[tuple[str, int, int]], packing: Packing) -> int:
    """The number of positions that samples of these (group_id, prompt_length, response_length) take together."""
    whole = [prompt + response - 1 for _, prompt, response in lengths]
    if packing == "padded":
        return len(whole) * max(whole, default=0)
    if packing == "packed":
        return sum(whole)
    prompts = {(group, prompt) for group, prompt, _ in lengths}
    return sum(prompt for _, prompt in prompts) + sum(max(0, response - 1) for _, _, response in lengths)


def _padded(samples: Sequence[Sample]) -> PackedRows:
    size = max(1, *(len(s.tokens) - 1 for s in samples))
    tokens = np.zeros((len(samples), size), dtype=np.int64)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample.tokens) - 1] = sample.tokens[:-1]
    positions = torch.arange(size).expand(len(samples), size).contiguous()
    lengths = torch.tensor([[len(s.tokens) - 1] for s in samples])
    sample_numbers = torch.arange(len(samples))[:, None].expand_as(positions).masked_fill(positions >= lengths, NOBODY)
    starts = [row * size for row in range(len(samples))]
    logit_positions = [_logit_positions(start, sample) for start, sample in zip(starts, samples, strict=True)]
    return PackedRows(Rows(torch.from_numpy(tokens), positions, None), logit_positions, sample_numbers)


def _families(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Samples of one group and one prompt together; a sample without a prompt is alone."""
    families: dict[tuple[str, bytes], list[Sample]] = {}
    for sample in samples:
        if sample.prompt_length == 0:
            yield [sample]
        else:
            prompt = sample.tokens[: sample.prompt_length].tobytes()
            families.setdefault((sample.group_id, prompt), []).append(sample)
    yield from families.values()


def _in_order(samples: Sequence[Sample], families: Sequence[Sequence[Sample]]) -> PackedRows:
    """Packs families, and gives logit_positions and sample_numbers in the order of the samples."""
    packed = _packed(families)
    in_rows = [s.sample_id for family in families for s in family]
    found = dict(zip(in_rows, packed.logit_positions, strict=True))
    numbers = {sample.sample_id: number for number, sample in enumerate(samples)}
    renumbered = torch.tensor([*(numbers[sample_id] for sample_id in in_rows), NOBODY])
    return PackedRows(packed.rows, [found[sample.sample_id] for sample in samples], renumbered[packed.sample_numbers])


def _packed(families: Sequence[Sequence[Sample]]) -> PackedRows:
    row = _Row()
    logit_positions = [of_one for family in families for of_one in row.add(family)]
    return PackedRows(row.rows(), logit_positions, row.sample_numbers())


class _Row:
    def __init__(self) -> None:
        self._tokens: list[NDArray[np.int32]] = []
        self._positions: list[Indices] = []
        self._segments: list[RowSegment] = []
        self._sample_numbers: list[Indices] = []
        self._num_samples = 0
        self._size = 0

    def add(self, family: Sequence[Sample]) -> list[Indices]:
        """Adds one sample, or several behind the prompt that they share; returns their logit positions."""
        if len(family) == 1:
            logit_positions = [_logit_positions(self._append(family[0].tokens[:-1], 0), family[0])]
            self._num_samples += 1
            return logit_positions
        prompt = family[0].prompt_length
        end = self._append(family[0].tokens[:prompt], 0) + prompt
        prefix = len(self._segments) - 1
        return [self._behind(end, prefix, sample) for sample in family]

    def sample_numbers(self) -> Tensor:
        """[1, S], by the number of the sample as it was added."""
        return torch.from_numpy(np.concatenate(self._sample_numbers))[None]

    def rows(self) -> Rows:
        """Never empty: a row of nothing but one-token samples gets a position that predicts nothing."""
        if not self._size:
            self._append(np.zeros(1, dtype=np.int32), 0)
            self._sample_numbers[-1][:] = NOBODY
        tokens = torch.from_numpy(np.concatenate(self._tokens).astype(np.int64))
        positions = torch.from_numpy(np.concatenate(self._positions))
        return Rows(tokens[None], positions[None], tuple(self._segments))

    def _behind(self, end: int, prefix: int, sample: Sample) -> Indices:
        number, self._num_samples = self._num_samples, self._num_samples + 1
        if sample.response_length == 0:
            return np.zeros(0, dtype=np.int64)
        own = self._append(sample.tokens[sample.prompt_length : -1], sample.prompt_length, prefix, number)
        return np.concatenate([[end - 1], np.arange(own, own + sample.response_length - 1)])

    def _append(
        self, tokens: NDArray[np.int32], first: int, prefix: int | None = None, sample: int | None = None
    ) -> int:
        start, self._size = self._size, self._size + len(tokens)
        if len(tokens):
            self._tokens.append(tokens)
            self._positions.append(np.arange(first, first + len(tokens)))
            self._sample_numbers.append(
                np.full(len(tokens), self._num_samples if sample is None else sample, dtype=np.int64)
            )
            self._segments.append(RowSegment(start, self._size, prefix))
        return start


def _logit_positions(start: int, sample: Sample) -> Indices:
    """The logit positions of a sample whose tokens lie one behind the other from `start` on."""
    end = len(sample.tokens) - 1
    # A response without a prompt has no position that predicts its first token.
    return np.arange(start + max(0, end - sample.response_length), start + end)


@dataclass(frozen=True, eq=False)
class SampleImages:
    """All images of one sample, on the CPU."""

    pixels: NDArray[np.float32]
    """[patches, numbers of a patch]"""
    grids: NDArray[np.int64]
    """[images, 3]"""

    @cached_property
    def digest(self) -> bytes:
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


FREE = -1
"""Stands for an expert: the router chooses for this token."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertChoices:
    """Each token's experts by layer, counted from 0 over the whole model.

    int64 [positions of the rows, experts of a token], in Megatron's order (position after position of all rows), empty
    where nothing is known.
    """

    by_layer: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutChoices:
    """Reads what the engines chose, which travels with the samples."""

    num_layers: int
    experts: Experts

    def of(self, samples: Sequence[Sample], sample_numbers: Tensor, rows: Rows) -> ExpertChoices:
        """The choices for these rows. `sample_numbers` [B, S]: the sample whose token a position holds; -1 means none.

        Raises InvalidArgument that names the sample whose column is missing or not of this model.
        """
        sample_numbers, positions = rows.own(sample_numbers, NOBODY), rows.positions.cpu()
        found = torch.full((*sample_numbers.shape, self.num_layers, self.experts.topk), FREE, dtype=torch.int64)
        for number, sample in enumerate(samples):
            mine = sample_numbers == number
            found[mine] = self._column(sample)[positions[mine]]
        by_layer = found.transpose(0, 1).flatten(0, 1).transpose(0, 1).contiguous().to(rows.tokens.device)
        return ExpertChoices({layer: by_layer[layer] for layer in self._layers})

    def check(self, sample: Sample) -> None:
        """Raises InvalidArgument when its column is missing or not of this model."""
        self._column(sample)

    @property
    def _layers(self) -> list[int]:
        return [layer for layer in range(self.num_layers) if self.experts.in_layer(layer)]

    def _column(self, sample: Sample) -> Tensor:
        column = sample.columns.get(ROUTED_EXPERTS)
        expected = (len(sample.tokens) - 1, self.num_layers, self.experts.topk)
        if column is None or column.shape != expected:
            found = "none" if column is None else str(list(column.shape))
            raise InvalidArgument(
                f"sample {sample.sample_id} has no {ROUTED_EXPERTS} of shape {list(expected)} (found {found}): "
                "--use-rollout-routing-replay makes engines return them, a generate function of your own sets "
                "sample.rollout_routed_experts"
            )
        known = torch.from_numpy(column.astype("int64"))
        ordered = known[:, self._layers].sort(-1).values
        is_free = (ordered == FREE).all(-1)
        is_choice = (ordered >= 0).all(-1) & (ordered < self.experts.count).all(-1) & (ordered.diff() > 0).all(-1)
        if not (is_free | is_choice).all():
            token, layer = (~(is_free | is_choice)).nonzero()[0].tolist()
            raise InvalidArgument(
                f"sample {sample.sample_id}: {ROUTED_EXPERTS} of token {token}, layer {self._layers[layer]} is "
                f"{known[token, self._layers[layer]].tolist()}, not {self.experts.topk} of the model's "
                f"{self.experts.count} experts"
            )
        return known
