"""The policy's weights on this rank: all of them, and those that training changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from services.trainer.hugging_face.convert import Converter
from services.trainer.hugging_face.model_shard import ModelShard
from services.trainer.model.lora.adapters import Adapters


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """`named` is everything, adapters included; a copy of another policy needs no more than what changes."""

    converter: Converter
    adapters: Adapters | None
    named: Mapping[str, Tensor]

    @property
    def shards(self) -> list[ModelShard]:
        """Everything with its place in the whole model."""
        return [*self.converter.shards(), *(self.adapters.shards if self.adapters else [])]

    @property
    def changing(self) -> Mapping[str, Tensor]:
        """The adapters' parameters, or everything without adapters."""
        return self.adapters.weights() if self.adapters else self.named

    @property
    def changing_shards(self) -> Sequence[ModelShard]:
        """The same with its place in the whole model."""
        return self.adapters.shards if self.adapters else self.shards

    def become(self, folder: Path) -> None:
        """Makes the policy the folder's model, with adapters off."""
        self.converter.load(folder)
        if self.adapters:
            self.adapters.switch_off()
