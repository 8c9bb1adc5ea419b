"""The experts that transformers chooses for the tokens of a text: what an engine's record is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM


class ChosenExperts:
    """Of the checkpoint's own weights, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._seen: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(self._model.model.layers):
            if isinstance(experts := getattr(layer.mlp, "experts", None), nn.Module):
                experts.register_forward_pre_hook(self._note(number))

    def of(self, tokens: Sequence[int]) -> dict[int, NDArray[np.int64]]:
        """By layer with experts [tokens - 1, experts of a token], in ascending order."""
        with torch.no_grad():
            self._model(torch.tensor([list(tokens[:-1])]))
        return {layer: np.sort(chosen.numpy(), -1) for layer, chosen in self._seen.items()}

    def _note(self, layer: int) -> Any:
        def note(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            self._seen[layer] = given[1]

        return note
