"""One model with its optimizer, as a named part of a checkpoint.

Tensors are named PART/KEY/KIND: the part is e.g. `policy`, the key a Hugging Face name, the kind `weight`, `main` (the
float32 master copy) or what the optimizer calls its state (`exp_avg`, `step`, …).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.errors import DataLoss
from services.trainer.checkpoint.reader import CheckpointReader, Expected
from services.trainer.checkpoint.shard_chunk import ShardChunk, whole_shape
from services.trainer.hugging_face.shards import ModelShard, split_dim
from services.trainer.megatron.optimizer import Optimizer, Slot, put

WEIGHT, MAIN = "weight", "main"


class ModelState:
    """This rank's share of the part `name`. `optimizer` is absent for a model that is not trained."""

    def __init__(self, name: str, shards: Sequence[ModelShard], optimizer: Optimizer | None) -> None:
        self._name = name
        self._shards = shards
        self._by_parameter = {id(shard.parameter): shard for shard in shards}
        self._optimizer = optimizer

    def chunks(self) -> Iterator[ShardChunk]:
        """The chunks that this rank writes; those of all ranks together hold everything exactly once."""
        for number, shard in enumerate(self._shards):
            if shard.num_replicas and number % shard.num_replicas == shard.replica:
                yield self._chunk(shard, WEIGHT, shard.parameter, 0)
        for number, slot in enumerate(self._slots()):
            shard = self._by_parameter[id(slot.parameter)]
            if self._writes(shard, slot, number):
                yield from self._slot_chunks(shard, slot)

    def scalars(self) -> Mapping[str, Any]:
        """The same on every rank."""
        return {} if self._optimizer is None else {self._name: self._optimizer.scalars()}

    def restore(self, reader: CheckpointReader) -> None:
        """Weights, optimizer and schedule, bit for bit. Raises DataLoss that names what is missing."""
        reader.require(self._expected(reader))
        self._read_weights(reader)
        if self._optimizer is None:
            return
        kinds = self._state_kinds(reader)
        for slot in self._slots():
            self._restore_slot(reader, self._by_parameter[id(slot.parameter)], slot, kinds)
        self._optimizer.restore_scalars(reader.scalars[self._name])

    def restore_weights(self, reader: CheckpointReader) -> None:
        """Weights alone: the start of another run, perhaps in another precision."""
        reader.require({self._tensor(shard, WEIGHT): Expected(_whole(shard)) for shard in self._shards})
        self._read_weights(reader)

    def _read_weights(self, reader: CheckpointReader) -> None:
        with torch.no_grad():
            for shard in self._shards:
                values = self._read(reader, shard, WEIGHT, 0, shard.parameter.numel())
                shard.parameter.copy_(values.reshape(shard.parameter.shape))

    def _restore_slot(self, reader: CheckpointReader, shard: ModelShard, slot: Slot, kinds: Sequence[str]) -> None:
        if slot.main is not None:
            slot.main.data.copy_(self._read(reader, shard, MAIN, slot.start, slot.end).reshape(slot.main.shape))
        slot.state.clear()
        like = slot.parameter.reshape(-1)[slot.start : slot.end] if slot.is_distributed else slot.parameter
        for kind in kinds:
            if kind == "step":
                put(slot.state, kind, reader.whole(self._tensor(shard, kind)), like)
            else:
                put(slot.state, kind, self._read(reader, shard, kind, slot.start, slot.end), like)

    def _expected(self, reader: CheckpointReader) -> dict[str, Expected]:
        """Moments may be kept in any precision; weights and their master copies are the job's."""
        found = {
            self._tensor(shard, WEIGHT): Expected(_whole(shard), str(shard.parameter.dtype).removeprefix("torch."))
            for shard in self._shards
        }
        if self._optimizer is None:
            return found
        scalars = reader.scalars.get(self._name)
        if scalars is None:
            raise DataLoss(
                f"the checkpoint has no part {self._name!r}: resume with the settings that it was saved with, or take "
                "its weights alone with --initial-megatron-checkpoint"
            )
        self._optimizer.require_same_kind(scalars)
        kinds = self._state_kinds(reader)
        for slot in self._slots():
            shard = self._by_parameter[id(slot.parameter)]
            for kind in kinds:
                found[self._tensor(shard, kind)] = Expected(() if kind == "step" else _whole(shard))
            if slot.main is not None:
                found[self._tensor(shard, MAIN)] = Expected(_whole(shard), "float32")
        return found

    def _state_kinds(self, reader: CheckpointReader) -> list[str]:
        """None before the first step; then every parameter that is trained has all of them."""
        names = [name for name in reader.names if name.startswith(f"{self._name}/")]
        return sorted({name.rpartition("/")[2] for name in names} - {WEIGHT, MAIN})

    def _slot_chunks(self, shard: ModelShard, slot: Slot) -> Iterator[ShardChunk]:
        if slot.main is not None:
            yield self._chunk(shard, MAIN, slot.main, slot.start)
        for kind, value in sorted(slot.state.items()):
            if kind != "step":
                yield self._chunk(shard, kind, value, slot.start)
            elif slot.start == 0 and shard.shard == 0:
                yield ShardChunk.whole(self._tensor(shard, kind), value)

    def _writes(self, shard: ModelShard, slot: Slot, number: int) -> bool:
        if shard.is_copy:
            return False
        return shard.speaks if slot.is_distributed else number % shard.num_replicas == shard.replica

    def _chunk(self, shard: ModelShard, kind: str, values: Tensor, start: int) -> ShardChunk:
        return ShardChunk(
            self._tensor(shard, kind),
            values.detach().reshape(-1),
            tuple(shard.parameter.shape),
            shard.shard,
            shard.num_shards,
            start,
            split_dim(shard.sharding),
        )

    def _read(self, reader: CheckpointReader, shard: ModelShard, kind: str, start: int, end: int) -> Tensor:
        return reader.run(self._tensor(shard, kind), shard.sharding, shard.shard, shard.num_shards, start, end)

    def _tensor(self, shard: ModelShard, kind: str) -> str:
        return f"{self._name}/{shard.key}/{kind}"

    def _slots(self) -> Iterator[Slot]:
        return iter(()) if self._optimizer is None else self._optimizer.slots()


def _whole(shard: ModelShard) -> tuple[int, ...]:
    return whole_shape(shard.parameter.shape, shard.num_shards, split_dim(shard.sharding))
