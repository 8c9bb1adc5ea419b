"""The parts of a trainer that a checkpoint holds: the policy, the models beside it, and the facts of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headrace.errors import ConfigError, DataLoss
from headrace.models.architecture import Architecture
from services.trainer.checkpoint.model_state import ModelState
from services.trainer.checkpoint.random_state import RandomState
from services.trainer.checkpoint.reader import CheckpointReader
from services.trainer.checkpoint.shard_chunk import ShardChunk
from services.trainer.hugging_face.model_shard import ModelShard
from services.trainer.model.lora.adapters import Adapters
from services.trainer.model.old_policies import OldPolicies

POLICY = "policy"
"""The name of the part that is trained"""
_MODEL = "model"
"""The scalars that say which model it is"""
_LORA = "lora"


class SavedParts:
    """One rank's share of a checkpoint. `models` have scalars; `others` are kept beside them."""

    def __init__(
        self,
        architecture: Architecture,
        models: Sequence[ModelState],
        others: Sequence[RandomState | OldPolicies],
        adapters: Adapters | None = None,
    ) -> None:
        self._facts = model_facts(architecture, adapters)
        self._models = models
        self._parts: Sequence[ModelState | RandomState | OldPolicies] = [*models, *others]

    def chunks(self) -> Iterator[ShardChunk]:
        """Weights, optimizer, random states: all ranks' chunks together are everything, each once."""
        for part in self._parts:
            yield from part.chunks()

    def scalars(self) -> dict[str, Any]:
        """The numbers of a checkpoint, equal on all ranks."""
        scalars = {name: value for model in self._models for name, value in model.scalars().items()}
        return {_MODEL: self._facts} | scalars

    def restore(self, reader: CheckpointReader) -> None:
        """Restores this share bit for bit, whatever layout wrote it. Raises DataLoss unless it is of this model."""
        require_same_model(reader, self._facts)
        for part in self._parts:
            part.restore(reader)


def require_same_model(reader: CheckpointReader, here: Mapping[str, Any]) -> None:
    """Raises DataLoss that names facts in which two models differ; their tensors may have the same shapes."""
    saved, own = (_options(facts) for facts in (reader.scalars[_MODEL], here))
    names = [name for name in sorted(saved.keys() | own.keys()) if saved.get(name) != own.get(name)]
    if not names:
        return
    differences = "; ".join(f"{name} {_said(saved.get(name))} there, {_said(own.get(name))} here" for name in names[:5])
    if all(name.startswith(_LORA) for name in names):
        raise DataLoss(
            f"the checkpoint has other adapters: {differences}: resume with the --lora-* options that it was saved "
            "with, or take its weights alone with --initial-megatron-checkpoint"
        )
    raise DataLoss(
        f"the checkpoint is of another model: {differences}: resume with the --hf-checkpoint that it was saved with, "
        "or take its weights alone with --initial-megatron-checkpoint"
    )


def _options(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with those of adapters beside the others, by their options' names."""
    lora = {f"{_LORA}_{name}": value for name, value in facts.get(_LORA, {}).items()}
    return {name: value for name, value in facts.items() if name != _LORA} | lora


def _said(value: Any) -> str:
    if value is None:
        return "unset"
    return (
        " ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def start_from(reader: CheckpointReader, shards: Sequence[ModelShard], adapters: Adapters | None) -> None:
    """Takes the weights alone of another run's checkpoint, adapters too. Raises ConfigError where they are unused."""
    if _LORA not in reader.scalars[_MODEL]:
        ModelState(POLICY, shards, None).restore_weights(reader)
        return
    if adapters is None:
        raise ConfigError(
            "initial_megatron_checkpoint has adapters of LoRA: pass the --lora-* options that it was saved with, or "
            "start from an export of it",
            field="initial_megatron_checkpoint",
        )
    ModelState(POLICY, [*shards, *adapters.shards], None).restore_weights(reader)


def model_facts(architecture: Architecture, adapters: Adapters | None) -> dict[str, Any]:
    """The architecture as a checkpoint's JSON has it, and what its adapters are if it has any."""
    facts: dict[str, Any] = json.loads(json.dumps(asdict(architecture)))
    return facts | ({_LORA: dict(adapters.facts)} if adapters else {})
