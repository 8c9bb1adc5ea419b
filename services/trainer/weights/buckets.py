"""Buckets of a model's tensors, and the memory that they are laid into.

Buckets travel one after the other. Their memory is allocated once and used for all further versions: flat buckets on
the sender, a copy of the served weights in the host's memory, and files in the machine's shared memory. Such a file is
a hard link to a segment below `.e<epoch>.segments`. A segment that no version's folder links to any more is free, and
the next version is laid into it: memory that was used before is several times as fast as new memory.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.delta import Change
from headrace.errors import FailedPrecondition, ResourceExhausted
from headrace.publication import TensorSpec
from services.trainer.weights.engine_layout import flat_bytes, travel_together

_FEWEST = 16
_SMALLEST_BYTES = 64 << 20


def filling_bytes(specs: Sequence[TensorSpec], limit_bytes: int) -> int:
    """The size at which buckets keep gathering, sending and loading busy at once: many buckets, none of them small.

    A bucket costs each engine a call; sending it takes some 0.1 s at the smallest size.
    """
    return min(limit_bytes, max(_SMALLEST_BYTES, sum(spec.num_bytes for spec in specs) // _FEWEST))


def split_into_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors, at most `bucket_bytes` to a bucket.

    A larger one travels alone; tensors that an engine fuses only when it gets both at once travel together.
    """
    buckets: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        is_full = not buckets or filled + spec.num_bytes > bucket_bytes
        if is_full and not (buckets and travel_together(buckets[-1][-1].name, spec.name)):
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += spec.num_bytes
    return buckets


_AT_ONCE = 2  # one on its way, one that is laid


class FlatBuckets:
    """Two buffers that take turns: what `pack` returned stays as it is until `pack` is called a second time."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(_AT_ONCE)]
        self._turn = 0

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns uint8, shape [bytes]; a view where there is one tensor."""
        parts = [flat_bytes(tensor) for tensor in tensors]
        if len(parts) == 1:
            return parts[0]
        self._turn = (self._turn + 1) % _AT_ONCE
        num_bytes = sum(part.numel() for part in parts)
        if self._buffers[self._turn].numel() < num_bytes:
            self._buffers[self._turn] = torch.empty(num_bytes, dtype=torch.uint8, device=parts[0].device)
        return torch.cat(parts, out=self._buffers[self._turn][:num_bytes])


class RollbackCopy:
    """Weights on the CPU that can be sent again. Its memory is made with the first copy and used for all others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, torch.Tensor] = {}

    def keep(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the place of what was kept before."""
        for name, tensor in tensors:
            if name not in self._kept:
                self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._kept[name].copy_(tensor.detach())

    def changed(self, name: str, tensor: Tensor) -> Change:
        """The values whose bits differ from the kept ones, found on the tensor's device."""
        new, kept = _as_bits(tensor), _as_bits(self._kept[name])
        if new.device.type == "cpu":  # numpy takes a quarter of torch's time
            positions = np.flatnonzero(new.numpy() != kept.numpy())
            bits = new.numpy()[positions]
        else:
            places = (new != kept.to(new.device, non_blocking=True)).nonzero().flatten()
            positions, bits = places.cpu().numpy(), new[places].cpu().numpy()
        dtype, size = str(tensor.dtype).removeprefix("torch."), tensor.element_size()
        return Change(name, dtype, tuple(tensor.shape), positions, bits.view(f"u{size}"))

    def change(self, changes: Iterable[Change]) -> None:
        """Keeps the changed weights in place of those that they were found with."""
        for change in changes:
            kept = _as_bits(self._kept[change.name])
            kept.numpy()[change.positions] = change.bits.view(kept.numpy().dtype)

    @property
    def is_empty(self) -> bool:
        """True before the first copy."""
        return not self._kept

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors in the order in which they were kept, on the device from which they are sent."""
        return ((name, tensor.to(self._device)) for name, tensor in self._kept.items())


def _as_bits(tensor: Tensor) -> Tensor:
    """Flat integers, one a value."""
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
_DTYPES |= {torch.int32: "I32"}
_ALIGNMENT = 8


class MemoryFiles:
    """The segments of one process."""

    def __init__(self) -> None:
        self._mapped: dict[Path, Tensor] = {}
        self._num_made = 0

    def write(self, path: Path, content: Mapping[str, Tensor]) -> None:
        """Makes the safetensors file `path` in a version's folder. Raises ResourceExhausted where memory is short."""
        header = _header(content)
        num_bytes = len(header) + sum(tensor.nbytes for tensor in content.values())
        segment = self._free_segment(path, num_bytes)
        mapped = self._mapped[segment]
        mapped[: len(header)].copy_(torch.frombuffer(header, dtype=torch.uint8))
        end = len(header)
        for tensor in content.values():
            start, end = end, end + tensor.nbytes
            mapped[start:end].copy_(flat_bytes(tensor))
        os.link(segment, path)

    def _free_segment(self, path: Path, num_bytes: int) -> Path:
        folder = path.parent.parent / segments_of(path.parent.name)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._mapped = {segment: mapped for segment, mapped in self._mapped.items() if segment.exists()}
        for segment, mapped in self._mapped.items():
            if segment.parent == folder and mapped.numel() == num_bytes and segment.stat().st_nlink == 1:
                return segment
        segment = folder / f"{os.getpid()}-{self._num_made}"
        self._num_made += 1
        _allocate(segment, num_bytes)
        self._mapped[segment] = torch.from_file(str(segment), shared=True, size=num_bytes, dtype=torch.uint8)
        return segment


def segments_of(publication: str) -> str:
    """The name of the folder that has the segments of a publication's epoch; its draft has the same."""
    return f".{publication.lstrip('.').split('-')[0]}.segments"


def make_private(root: Path) -> None:
    """Makes the folder for this user alone. Raises FailedPrecondition where somebody else has made it."""
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise FailedPrecondition(
            f"{root} is not a folder that this user alone may read and write: remove it, or use "
            "--update-weight-transport disk"
        )


def _header(content: Mapping[str, Tensor]) -> bytearray:
    """The format: eight bytes with the header's length, the header, the tensors (huggingface.co/docs/safetensors)."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in content.items():
        start, end = end, end + tensor.nbytes
        fields[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return bytearray(len(text).to_bytes(8, "little") + text)


def _allocate(segment: Path, num_bytes: int) -> None:
    """Reserves all of it: a page that is missing later would kill the process that writes there."""
    handle = os.open(segment, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        segment.unlink()
        raise ResourceExhausted(
            f"{num_bytes} bytes of shared memory for {segment} cannot be had ({error.strerror}): enlarge "
            f"{segment.parents[2]} (for a container: --shm-size), or use --update-weight-transport disk"
        ) from error
    finally:
        os.close(handle)
