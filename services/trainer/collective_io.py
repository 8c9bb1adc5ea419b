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
from dataclasses import dataclass, field
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
_MESSAGE_CHARACTERS = 900


@dataclass(slots=True)
class CollectiveIO:
    """One operation on files. `refusal` is the class of the error for a path that cannot be used."""

    group: dist.ProcessGroup
    device: torch.device = _CPU
    refusal: type[FailedPrecondition | InvalidArgument] = FailedPrecondition
    _failure: HeadraceError | None = field(default=None, init=False)

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
        own = b"" if self._failure is None else _encoded(self._failure, self.group)
        if first := next(filter(None, gathered_bytes(own, self.group, self.device)), None):
            raise _decoded(first) from self._failure

    def do(self, work: Callable[[], T]) -> T:
        found: list[T] = []
        self.attempt(lambda: found.append(work()))
        self.agree()
        return found[0]

    def gather(self, text: str) -> list[str]:
        """Collective: every rank's text, on the first rank; [] on the others."""
        found = gathered_bytes(text.encode(), self.group, self.device, to_all=False)
        return [each.decode() for each in found]

    def _of_disk(self, error: OSError | SafetensorError) -> HeadraceError:
        number = error.errno if isinstance(error, OSError) else _errno(str(error))
        if number in FULL_DISK:
            return ResourceExhausted(f"the disk is full: {error}: free some space, or name a folder on another disk")
        return self.refusal(f"the disk refuses: {error}")


def _errno(message: str) -> int | None:
    """The system's error, which safetensors puts into its message."""
    found = re.search(r"\(os error (\d+)\)", message)
    return int(found[1]) if found else None


def _encoded(error: HeadraceError, group: dist.ProcessGroup) -> bytes:
    whose = f"rank {group.rank()}: " if group.size() > 1 else ""
    return json.dumps([type(error).__name__, f"{whose}{error.message}"[:_MESSAGE_CHARACTERS]]).encode()


def _decoded(data: bytes) -> HeadraceError:
    name, message = json.loads(data)
    kinds = {kind.__name__: kind for kind in error_classes()}
    return kinds[name](message)


def gathered_bytes(
    mine: bytes, group: dist.ProcessGroup | None, device: torch.device, *, to_all: bool = True
) -> list[bytes]:
    """Collective: what each rank gave, by rank; with `to_all` False [] on all but the first rank."""
    world_size, is_first = dist.get_world_size(group), dist.get_rank(group) == 0
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([len(mine)], dtype=torch.int64, device=device), group=group)
    sizes = [int(count) for count in counts]
    found = [torch.zeros(max(sizes), dtype=torch.uint8, device=device) for _ in sizes] if to_all or is_first else []
    if any(sizes):
        padded = torch.frombuffer(bytearray(mine.ljust(max(sizes), b"\0")), dtype=torch.uint8).to(device)
        if to_all:
            dist.all_gather(found, padded, group=group)
        else:
            dist.gather(padded, found or None, group=group, group_dst=0)
    return [each[:size].cpu().numpy().tobytes() for each, size in zip(found, sizes, strict=False)]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes the file with the mode that the umask gives; it is not synced.

    safetensors writes a draft of its own, which only its owner can read, and gives it the name.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), str(path), metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)
