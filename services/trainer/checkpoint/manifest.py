"""The content of a checkpoint's folder: chunks of tensors in a file of each rank, and a manifest, written last.

A tensor of the whole model is cut into `num_shards` by tensor parallelism, in the way its `Sharding` says. A shard is
laid flat, and a rank of the distributed optimizer holds a run of it. So a chunk has whole-tensor coordinates: the
tensor's name, which shard of how many, and where in it the run begins. Any layout can be put together from them.

A folder with a true manifest is whole. The manifest is plain JSON with a checksum.
"""

from __future__ import annotations

import json
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from headrace.disk import durable_write, sync
from headrace.errors import DataLoss, FailedPrecondition
from services.trainer.collective_io import write_tensors
from services.trainer.hugging_face.shards import whole_shape

FORMAT = 2
"""1 did not say what the whole tensors are, so a larger model's checkpoint could be taken for a smaller one's."""

MAX_MANIFEST_BYTES = 1 << 30
_NAME = "manifest.json"
PACKAGES = ("headrace", "torch", "megatron-core")


@dataclass(frozen=True, slots=True)
class ShardChunk:
    """The elements of one shard of a tensor from `start` on."""

    tensor: str
    values: Tensor
    """[n], the elements laid flat"""
    shape: tuple[int, ...]
    """The shape of the whole shard."""
    shard: int = 0
    num_shards: int = 1
    start: int = 0
    split_dim: int = 0
    """The dimension that the shards divide."""

    @classmethod
    def whole(cls, tensor: str, values: Tensor) -> ShardChunk:
        return cls(tensor, values.detach().reshape(-1), tuple(values.shape))


@dataclass(frozen=True, slots=True)
class Place:
    """The manifest's entry for a chunk: which file it is in, and which part of which tensor it is."""

    tensor: str
    file: str
    key: str
    """Its name in the file; unique over all ranks."""
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole shard."""
    whole_shape: tuple[int, ...]
    """The shape of all shards together: the same under every layout."""
    shard: int
    num_shards: int
    start: int
    end: int

    @classmethod
    def of(cls, chunk: ShardChunk, file: str) -> Place:
        return cls(
            tensor=chunk.tensor,
            file=file,
            key=f"{chunk.tensor}@{chunk.shard}.{chunk.start}",
            dtype=str(chunk.values.dtype).removeprefix("torch."),
            shape=chunk.shape,
            whole_shape=whole_shape(chunk.shape, chunk.num_shards, chunk.split_dim),
            shard=chunk.shard,
            num_shards=chunk.num_shards,
            start=chunk.start,
            end=chunk.start + chunk.values.numel(),
        )


@dataclass(frozen=True, slots=True)
class FileFacts:
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class RankFile:
    name: str
    facts: FileFacts
    places: Sequence[Place]

    @classmethod
    def write(cls, folder: Path, rank: int, chunks: Sequence[ShardChunk]) -> RankFile:
        """The file is on the disk when it returns. No collective."""
        path = folder / f"rank-{rank:05d}.safetensors"
        places = [Place.of(chunk, path.name) for chunk in chunks]
        write_tensors(path, {place.key: chunk.values for place, chunk in zip(places, chunks, strict=True)})
        sync(path)
        return cls(path.name, FileFacts(path.stat().st_size, crc32(path)), places)


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    policy_version: int
    ledger_epoch: int
    layout: str
    versions: Mapping[str, str]
    """The versions of the packages that had a part in it, by name."""
    scalars: Mapping[str, Any]
    """The parts' numbers, e.g. the schedule's place, and the model's facts."""
    files: Mapping[str, FileFacts]
    places: Sequence[Place]
    scored_by: Mapping[str, int] = field(default_factory=dict)
    """The samples that were trained since the checkpoint before, by the scorers that paid and their versions."""

    def write(self, folder: Path) -> None:
        """Returns when the manifest is on the disk; the files that it names were put there before."""
        body = asdict(self)
        with durable_write(folder / _NAME) as draft:
            draft.write_text(json.dumps({"format": FORMAT, "crc32": _crc32_of(body), "manifest": body}))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises DataLoss unless the folder holds a true manifest and all its files at their full size.

        Raises FailedPrecondition for a manifest that an older headrace wrote.
        """
        try:
            manifest = cls._parsed(folder)
            manifest._require_files(folder)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataLoss(f"{folder} has no readable {_NAME}: {str(error)[:500]}") from error
        return manifest

    def verify(self, folder: Path, name: str) -> None:
        """Raises DataLoss unless the file's bytes are those that were written."""
        try:
            found = crc32(folder / name)
        except OSError as error:
            raise DataLoss(f"{folder}/{name} cannot be read: {error}") from error
        if found != self.files[name].crc32:
            raise DataLoss(f"{folder}/{name} is not what was written: crc32 {found}, not {self.files[name].crc32}")

    @classmethod
    def _parsed(cls, folder: Path) -> Manifest:
        path = folder / _NAME
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_MANIFEST_BYTES:
            raise DataLoss(f"{path} is not a file of at most {MAX_MANIFEST_BYTES} bytes")
        found = json.loads(path.read_bytes())
        if _crc32_of(found["manifest"]) != found["crc32"]:
            raise DataLoss(f"{path} is not what was written: its checksum differs")
        if found.get("format") != FORMAT:
            raise FailedPrecondition(
                f"{folder} is a checkpoint of format {found.get('format', 1)}, and this headrace reads {FORMAT}: "
                f"resume it with headrace {found['manifest']['versions']['headrace']}, or export it there and start "
                "from the exported folder"
            )
        return _MANIFEST.validate_python(found["manifest"])

    def _require_files(self, folder: Path) -> None:
        sizes = {path.name: path.lstat().st_size for path in folder.iterdir() if path.is_file()}
        broken = sorted(name for name, facts in self.files.items() if sizes.get(name) != facts.num_bytes)
        if broken:
            raise DataLoss(f"{folder} lacks {', '.join(broken)} in full: copy it again, or use another checkpoint")
        if unknown := {place.file for place in self.places} - self.files.keys():
            raise DataLoss(f"{folder}/{_NAME} names files that it does not list: {', '.join(sorted(unknown))}")


_MANIFEST, RANK_FILE = TypeAdapter(Manifest), TypeAdapter(RankFile)


def crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _crc32_of(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
