"""The parts of a trainer that a checkpoint holds: the policy, the models beside it, and the facts of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from headrace.errors import DataLoss
from headrace.models.architecture import Architecture
from services.trainer.checkpoint.model_state import ModelState
from services.trainer.checkpoint.random_state import RandomState
from services.trainer.checkpoint.reader import CheckpointReader
from services.trainer.checkpoint.shard_chunk import ShardChunk
from services.trainer.model.old_policies import OldPolicies

POLICY = "policy"
"""The name of the part that is trained"""
_MODEL = "model"
"""The scalars that say which model it is"""


class SavedParts:
    """One rank's share of a checkpoint. `models` have scalars; `others` are kept beside them."""

    def __init__(
        self, architecture: Architecture, models: Sequence[ModelState], others: Sequence[RandomState | OldPolicies]
    ) -> None:
        self._architecture = architecture
        self._models = models
        self._parts: Sequence[ModelState | RandomState | OldPolicies] = [*models, *others]

    def chunks(self) -> Iterator[ShardChunk]:
        """Weights, optimizer, random states: all ranks' chunks together are everything, each once."""
        for part in self._parts:
            yield from part.chunks()

    def scalars(self) -> dict[str, Any]:
        """The numbers of a checkpoint, equal on all ranks."""
        scalars = {name: value for model in self._models for name, value in model.scalars().items()}
        return {_MODEL: _facts(self._architecture)} | scalars

    def restore(self, reader: CheckpointReader) -> None:
        """Restores this share bit for bit, whatever layout wrote it. Raises DataLoss unless it is of this model."""
        require_same_model(reader, self._architecture)
        for part in self._parts:
            part.restore(reader)


def require_same_model(reader: CheckpointReader, architecture: Architecture) -> None:
    """Raises DataLoss that names facts in which two architectures differ; their tensors may have the same shapes."""
    saved, here = reader.scalars[_MODEL], _facts(architecture)
    names = [name for name in sorted(saved.keys() | here.keys()) if saved.get(name) != here.get(name)]
    if names:
        differences = ", ".join(f"{name} is {saved.get(name)} there and {here.get(name)} here" for name in names[:5])
        raise DataLoss(
            f"the checkpoint is of another model: {differences}: resume with the --hf-checkpoint that it was saved "
            "with, or take its weights alone with --initial-megatron-checkpoint"
        )


def _facts(architecture: Architecture) -> dict[str, Any]:
    """The architecture as a checkpoint's JSON has it."""
    facts: dict[str, Any] = json.loads(json.dumps(asdict(architecture)))
    return facts
