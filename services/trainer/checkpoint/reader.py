"""Reading a checkpoint for whatever layout reads it: runs of shards, put together from other runs of other shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
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
from services.trainer.checkpoint.manifest import Manifest
from services.trainer.checkpoint.shard_chunk import Place
from services.trainer.files.agreement import CollectiveIO
from services.trainer.hugging_face.shards import cut, merge
from services.trainer.megatron.parallel import Layout

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that this job reads from a checkpoint."""

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
        self._handles = ExitStack()
        self.read_names: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in an order that every rank agrees on."""
        return sorted(self._places)

    @property
    def scalars(self) -> Mapping[str, Any]:
        """The numbers of each part, by the part's name."""
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
        """True when the checkpoint holds it."""
        return name in self._places

    def whole(self, name: str) -> Tensor:
        """A tensor that is not cut."""
        place = self._of(name)[0]
        return self._run(name, 0, 0, place.shard_elements).reshape(place.shape)

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
        shape = next(place.shape for place in self._of(name) if place.shard == shard)
        elements = torch.Size(shape).numel()
        return self._run(name, shard, 0, elements).reshape(shape)

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
            file = safe_open(str(self._folder / place.file), framework="pt")
            self._open[place.file] = self._handles.enter_context(file)
        values: Tensor = self._open[place.file].get_slice(place.key)[start:end]
        return values

    def _of(self, name: str) -> list[Place]:
        if name not in self._places:
            raise DataLoss(f"checkpoint {self._folder} lacks {name}: resume with the settings it was saved with")
        self.read_names.add(name)
        return self._places[name]


def all_true(folder: Path, manifest: Manifest, layout: Layout) -> bool:
    """True on all ranks when every byte is what was written; each rank looks through a part of the files."""
    work = CollectiveIO(layout.files_group, _CPU)
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
    manifest = CollectiveIO(layout.files_group, _CPU).do(lambda: Manifest.read(folder))
    if not all_true(folder, manifest, layout):
        raise DataLoss(f"{folder} is damaged: name another checkpoint")
    return CheckpointReader(folder, manifest)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
