"""Files of weights in the machine's shared memory, whose memory is allocated once and used for all further versions.

A file is a hard link to a segment below `.e<epoch>.segments`. A segment that no version's folder links to any more is
free, and the next version is laid into it: memory that was used before is several times as fast as new memory.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import FailedPrecondition, ResourceExhausted
from services.trainer.weights.engine_layout import flat_bytes

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
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
