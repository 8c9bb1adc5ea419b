"""Lays the samples of a micro-batch into the rows that go through the model.

padded: one sample a row, zeros behind it. packed: one row, sample after sample. shared_prompts: one row, and samples of
a group that begin with the same prompt follow a single copy of it, which each of them sees before itself. A causal
model computes the same for a token in all three, for what a token sees is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from headrace.trajectory import Sample

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
        """The number of positions it covers."""
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
        """The same rows on another device."""
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
    """One row that grows."""

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
