"""Work on files among ranks that compute together, and the tensor files that they write.

The work is done on all of them, or the same error is raised on all. A rank that failed alone would leave the others
waiting in the next collective. So each rank does its part without collectives, and all tell each other how it went
before anyone goes on. After a failure a rank tries nothing more.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headrace.disk import FULL_DISK
from headrace.errors import (
    FailedPrecondition,
    HeadraceError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    error_classes,
)

T = TypeVar("T")

_CPU = torch.device("cpu")
_ERROR_BYTES = 4096
_MESSAGE_CHARACTERS = 900


class CollectiveIO:
    """One operation on files. `refusal` is the class of the error for a path that cannot be used."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device = _CPU,
        refusal: type[FailedPrecondition | InvalidArgument] = FailedPrecondition,
    ) -> None:
        self._group = group
        self._device = device
        self._refusal = refusal
        self._failure: HeadraceError | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """This rank's part. A failure is kept for `agree`; None then, and after an earlier failure."""
        if self._failure is not None:
            return None
        try:
            return work()
        except HeadraceError as error:
            self._failure = error
        except (OSError, SafetensorError) as error:
            self._failure = self._of_disk(error)
        except Exception as error:  # noqa: BLE001  # a bug: the other ranks wait to hear of it as of any failure
            self._failure = Internal(f"{type(error).__name__}: {error}")
        return None

    def agree(self) -> None:
        """Collective. Raises the error of the first rank that failed, on every rank."""
        world_size, rank = self._group.size(), self._group.rank()
        first = torch.tensor([world_size if self._failure is None else rank], device=self._device)
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
        failed = int(first.item())
        if failed == world_size:
            return
        data = torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
        if self._failure is not None:
            encoded = _encoded(self._failure, f"rank {rank}: " if world_size > 1 else "")
            data[: len(encoded)] = torch.frombuffer(encoded, dtype=torch.uint8)
        data = data.to(self._device)
        dist.broadcast(data, src=dist.get_global_rank(self._group, failed), group=self._group)
        raise _decoded(bytes(data.tolist()).rstrip(b"\0")) from self._failure

    def do(self, work: Callable[[], T]) -> T:
        """Attempts the work and agrees on it."""
        found: list[T] = []
        self.attempt(lambda: found.append(work()))
        self.agree()
        return found[0]

    def gather(self, text: str) -> list[str]:
        """Collective: every rank's text, on the first rank; [] on the others."""
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self._group.size())]
        dist.all_gather(sizes, torch.tensor([len(own)], device=self._device), group=self._group)
        padded = torch.zeros(max(int(size.item()) for size in sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        padded = padded.to(self._device)
        found = [torch.empty_like(padded) for _ in sizes] if self._group.rank() == 0 else None
        dist.gather(padded, found, dst=dist.get_global_rank(self._group, 0), group=self._group)
        texts = zip(found or [], sizes, strict=False)
        return [bytes(data[: int(size.item())].cpu().numpy()).decode() for data, size in texts]

    def _of_disk(self, error: OSError | SafetensorError) -> HeadraceError:
        number = error.errno if isinstance(error, OSError) else _errno(str(error))
        if number in FULL_DISK:
            return ResourceExhausted(f"the disk is full: {error}: free some space, or name a folder on another disk")
        return self._refusal(f"the disk refuses: {error}")


def _errno(message: str) -> int | None:
    """The system's error, which safetensors puts into its message."""
    found = re.search(r"\(os error (\d+)\)", message)
    return int(found[1]) if found else None


def _encoded(error: HeadraceError, prefix: str) -> bytearray:
    message = f"{prefix}{error.message}"[:_MESSAGE_CHARACTERS]
    return bytearray(json.dumps({"error": type(error).__name__, "message": message}).encode())


def _decoded(data: bytes) -> HeadraceError:
    found = json.loads(data)
    kinds = {kind.__name__: kind for kind in error_classes()}
    return kinds[found["error"]](found["message"])


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes the file with the mode that the umask gives; it is not synced.

    safetensors writes a draft of its own, which only its owner can read, and gives it the name.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), str(path), metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)
