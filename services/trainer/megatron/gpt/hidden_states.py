"""A GPTModel that stops before its output layer and takes its rotary angles from the rows.

Logits of every position are the largest tensor of a step, and only those that predict a response are wanted: the last
stage gives its hidden states, and algorithms/vocab_parallel.py projects the wanted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from services.trainer.megatron.gpt.segment_attention import SegmentedRow


def give_hidden_states(model: GPTModel) -> GPTModel:
    """The same model, in place: its forward gives [B, S, H] on the last stage, and segmented rows find their angles."""
    if model.post_process:
        model.output_layer = PassThrough(model.output_layer)
    for name, module in list(model.named_modules()):
        for child, rotary in list(module.named_children()):
            if child == "rotary_pos_emb":
                setattr(model.get_submodule(name), child, RotaryAtPositions(rotary))
    return model


def output_weight(model: GPTModel) -> Tensor:
    """[V / tp, H] of a last stage: its own or the embedding's."""
    weight: Tensor = (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
    return weight


class PassThrough(nn.Module):
    """Stands where the output layer was, with its weight (None where the embedding's is used)."""

    def __init__(self, output_layer: Any) -> None:
        super().__init__()
        self.register_parameter("weight", output_layer.weight)

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """Unchanged, and no bias."""
        return hidden, None


class RotaryAtPositions(nn.Module):
    """Megatron asks how long a row is and hands the answer back; a segmented row answers with its positions."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self._rotary = rotary
        self.axes: Callable[[], tuple[Tensor, Sequence[int]] | None] = lambda: None
        """The next rows' positions [3, B, S], and how many frequencies turn with each axis; None: plain."""

    def get_rotary_seq_len(self, *arguments: Any, **named: Any) -> int | Tensor:
        """The row's length, or its positions [T]."""
        for argument in (*arguments, *named.values()):
            if isinstance(argument, SegmentedRow):
                return argument.positions
        length: int = self._rotary.get_rotary_seq_len(*arguments, **named)
        return length

    def forward(self, length: int | Tensor, **named: Any) -> Any:
        """Angles [length, 1, 1, d], or [T, 1, 1, d] at the positions; Yarn's scale comes with them."""
        if (found := self.axes()) is not None:
            return self._at_axes(*found, **named)
        if isinstance(length, int):
            return self._rotary(length, **named)
        angles = self._rotary(int(length.max()) + 1, **named)
        return (angles[0][length], angles[1]) if isinstance(angles, tuple) else angles[length]

    def _at_axes(self, axes: Tensor, sections: Sequence[int], **named: Any) -> Tensor:
        """Angles [S, B, 1, d]: each frequency, in both halves of d, turns with the place on its own axis."""
        angles = self._rotary(int(axes.max()) + 1, **named)[:, 0, 0]
        halves = angles[axes].chunk(2, dim=-1)
        parts = [half.split(tuple(sections), dim=-1)[axis][axis] for half in halves for axis in range(len(sections))]
        return torch.cat(parts, dim=-1).transpose(0, 1)[:, :, None]
