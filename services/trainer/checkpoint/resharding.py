"""A training state under any layout of ranks: what each rank writes of it, and how any other layout takes it up again.

A rank that reads gets runs of shards, put together from other runs of other shards; never a whole model.

Tensors of a model are named PART/KEY/KIND: the part is e.g. `policy`, the key a Hugging Face name, the kind `weight`,
`main` (the float32 master copy) or what the optimizer calls its state (`exp_avg`, `step`, …).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.errors import DataLoss
from headrace.models.family import Sharding
from headrace.rpc.log import log
from services.trainer.checkpoint.manifest import Manifest, Place, ShardChunk
from services.trainer.collective_io import CollectiveIO
from services.trainer.hugging_face.shards import ModelShard, cut, merge, split_dim
from services.trainer.megatron.optimizer import Optimizer, Slot, put
from services.trainer.megatron.parallel import Layout


@dataclass(frozen=True, slots=True)
class Expected:
    shape: tuple[int, ...]
    """The shape of the whole tensor, whatever the layout."""
    dtype: str | None = None
    """None: any that can be converted."""


class CheckpointReader:
    """The tensors of one checkpoint folder, read a run at a time; never a whole model."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._places: dict[str, list[Place]] = defaultdict(list)
        for place in manifest.places:
            self._places[place.tensor].append(place)
        self._open: dict[str, Any] = {}
        self.read_names: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in an order that every rank agrees on."""
        return sorted(self._places)

    @property
    def scalars(self) -> Mapping[str, Any]:
        return self._manifest.scalars

    def require(self, expected: Mapping[str, Expected]) -> None:
        """Raises DataLoss that names the tensors which are not there, or are another model's."""
        if missing := sorted(expected.keys() - self._places.keys()):
            raise DataLoss(
                f"checkpoint {self._folder} lacks {len(missing)} tensors that this job has: {_some(missing)}: resume "
                "with the settings it was saved with, or take its weights alone with --initial-megatron-checkpoint"
            )
        if others := [found for name in sorted(expected) if (found := self._difference(name, expected[name]))]:
            raise DataLoss(
                f"checkpoint {self._folder} is not of this job's model: {len(others)} tensors differ: "
                f"{_some(others)}: resume with the --hf-checkpoint and the precision that it was saved with"
            )

    def has(self, name: str) -> bool:
        return name in self._places

    def whole(self, name: str) -> Tensor:
        return self._shard(name, 0)

    def run(self, name: str, sharding: Sharding, shard: int, num_shards: int, start: int, end: int) -> Tensor:
        """[end - start]: a run of one of `num_shards` shards, flat, however many shards the file has."""
        first = self._of(name)[0]
        if first.num_shards == num_shards:
            return self._run(name, shard, start, end)
        shards = [self._shard(name, number) for number in range(first.num_shards)]
        mine = cut(sharding, merge(sharding, shards), shard, num_shards)
        return mine.reshape(-1)[start:end].clone()

    def _difference(self, name: str, expected: Expected) -> str | None:
        for place in self._places[name]:
            if place.whole_shape != expected.shape:
                return f"{name} has shape {list(place.whole_shape)} there and {list(expected.shape)} here"
            if expected.dtype is not None and place.dtype != expected.dtype:
                return f"{name} is {place.dtype} there and {expected.dtype} here"
        return None

    def _shard(self, name: str, shard: int) -> Tensor:
        place = self._of(name)[0]
        return self._run(name, shard, 0, math.prod(place.shape)).reshape(place.shape)

    def _run(self, name: str, shard: int, start: int, end: int) -> Tensor:
        parts, at = [], start
        for place in sorted((p for p in self._of(name) if p.shard == shard), key=lambda p: p.start):
            low, high = max(start, place.start), min(end, place.end)
            if low == at and low < high:
                parts.append(self._slice(place, low - place.start, high - place.start))
                at = high
        if at != end:
            raise DataLoss(f"checkpoint {self._folder}: {name} has no elements {at} to {end} of shard {shard}")
        return torch.cat(parts) if parts else torch.empty(0)

    def _slice(self, place: Place, start: int, end: int) -> Tensor:
        if place.file not in self._open:
            self._open[place.file] = safe_open(str(self._folder / place.file), framework="pt")
        values: Tensor = self._open[place.file].get_slice(place.key)[start:end]
        return values

    def _of(self, name: str) -> list[Place]:
        if name not in self._places:
            raise DataLoss(f"checkpoint {self._folder} lacks {name}: resume with the settings it was saved with")
        self.read_names.add(name)
        return self._places[name]


def all_true(folder: Path, manifest: Manifest, layout: Layout) -> bool:
    """True on all ranks when every byte is what was written; each rank looks through a part of the files."""
    work = CollectiveIO(layout.files_group)
    for name in sorted(manifest.files)[layout.rank :: layout.world_size]:
        work.attempt(partial(manifest.verify, folder, name))
    try:
        work.agree()
    except DataLoss as error:
        log.warning("checkpoint_damaged", error=error.message)
        return False
    return True


def opened(folder: Path, layout: Layout) -> CheckpointReader:
    """A checkpoint by its own folder. Raises DataLoss when it is damaged. Collective."""
    manifest = CollectiveIO(layout.files_group).do(lambda: Manifest.read(folder))
    if not all_true(folder, manifest, layout):
        raise DataLoss(f"{folder} is damaged: name another checkpoint")
    return CheckpointReader(folder, manifest)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


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
        reader.require({self._tensor(shard, WEIGHT): Expected(shard.whole_shape) for shard in self._shards})
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
        for kind in kinds:
            if kind == "step":
                put(slot.state, kind, reader.whole(self._tensor(shard, kind)), slot.updated)
            else:
                put(slot.state, kind, self._read(reader, shard, kind, slot.start, slot.end), slot.updated)

    def _expected(self, reader: CheckpointReader) -> dict[str, Expected]:
        """Moments may be kept in any precision; weights and their master copies are the job's."""
        found = {
            self._tensor(shard, WEIGHT): Expected(shard.whole_shape, str(shard.parameter.dtype).removeprefix("torch."))
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
                found[self._tensor(shard, kind)] = Expected(() if kind == "step" else shard.whole_shape)
            if slot.main is not None:
                found[self._tensor(shard, MAIN)] = Expected(shard.whole_shape, "float32")
        return found

    def _state_kinds(self, reader: CheckpointReader) -> list[str]:
        """None before the first step; then every parameter that is trained has all of them."""
        names = [name for name in reader.names if name.startswith(f"{self._name}/")]
        return sorted({name.rpartition("/")[2] for name in names} - {WEIGHT, MAIN})

    def _slot_chunks(self, shard: ModelShard, slot: Slot) -> Iterator[ShardChunk]:
        if slot.main is not None:
            yield self._chunk(shard, MAIN, slot.main, slot.start)
        for kind, value in sorted(slot.state.items()):
            if kind == "master_param":  # an offloaded optimizer's name for slot.updated
                continue
            if kind != "step":
                yield self._chunk(shard, kind, value, slot.start)
            elif slot.start == 0 and shard.shard == 0:
                yield ShardChunk.whole(self._tensor(shard, kind), value)

    def _writes(self, shard: ModelShard, slot: Slot, number: int) -> bool:
        if not shard.num_replicas:  # a tied embedding's copy on the last stage: another shard is saved in its place
            return False
        return shard.is_reporting if slot.is_distributed else number % shard.num_replicas == shard.replica

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


RANDOM = "random/"
_GENERATORS = {
    "cpu": (torch.get_rng_state, torch.set_rng_state),
    "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
}


class RandomState:
    """The states of this rank's random number generators: the CPU's, and the GPU's where there is one.

    A rank that was not there when the checkpoint was written goes on with rank 0's.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

    def chunks(self) -> Iterator[ShardChunk]:
        for device in self._devices:
            yield ShardChunk.whole(f"{RANDOM}{device}/{self._rank}", _GENERATORS[device][0]())

    def restore(self, reader: CheckpointReader) -> None:
        for device in self._devices:
            names = [f"{RANDOM}{device}/{rank}" for rank in (self._rank, 0)]
            if there := [name for name in names if reader.has(name)]:
                _GENERATORS[device][1](reader.whole(there[0]))
