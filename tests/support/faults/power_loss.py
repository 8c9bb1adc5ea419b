"""A disk in memory that remembers every operation, so that the power can be cut after any of them.

What was written and not synced is cut into blocks, of which any may be on the disk and any not; names made or deleted
since the folder was synced may be there or not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.protobuf import Payload
from services.buffer.store.payload_files import DiskFiles

BLOCK_BYTES = 512
Image = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Operation:
    """`kind` is the method of DiskFiles."""

    kind: str
    name: str = ""
    number: int = 0
    """Offset of a write."""
    data: bytes = b""


class MemoryFiles(DiskFiles):
    """Files without a disk. `operations` is what was asked of it."""

    def __init__(self, image: Image) -> None:
        self.contents = {name: bytearray(data) for name, data in image.items()}
        self.operations: list[Operation] = []

    def names(self) -> list[str]:
        return sorted(self.contents)

    def create(self, name: str) -> None:
        assert name not in self.contents
        self._do(Operation("create", name))

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        self._do(Operation("write", name, 0, b"".join(parts)))

    def sync(self, name: str) -> None:
        self._do(Operation("sync", name))

    def sync_folder(self) -> None:
        self._do(Operation("sync_folder"))

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        found = self.contents.get(name)
        if found is None:
            raise FileNotFoundError(name)
        return bytes(found[offset : offset + num_bytes])

    def size(self, name: str) -> int:
        if name not in self.contents:
            raise FileNotFoundError(name)
        return len(self.contents[name])

    def delete(self, name: str) -> None:
        self._do(Operation("delete", name))

    def free_bytes(self) -> int:
        return 1 << 40

    def _do(self, operation: Operation) -> None:
        self.operations.append(operation)
        _apply(self.contents, operation)


def _apply(contents: dict[str, bytearray], operation: Operation) -> None:
    match operation.kind:
        case "create":
            contents[operation.name] = bytearray()
        case "write":
            file = contents[operation.name]
            end = operation.number + len(operation.data)
            file.extend(bytes(max(end - len(file), 0)))
            file[operation.number : end] = operation.data
        case "delete":
            del contents[operation.name]


@dataclass
class Disk:
    """What is certain, and what was asked since."""

    certain: dict[str, bytearray] = field(default_factory=dict)
    pending: dict[str, list[Operation]] = field(default_factory=dict)
    """By file, since its last sync."""
    new: set[str] = field(default_factory=set)
    deleted: dict[str, bytearray] = field(default_factory=dict)
    """By names that may still be there."""

    def ask(self, operation: Operation) -> None:
        """One more operation."""
        name = operation.name
        match operation.kind:
            case "sync":
                for pending in self.pending.pop(name, []):
                    _apply(self.certain, pending)
            case "sync_folder":
                self.new.clear()
                self.deleted.clear()
            case "delete":
                self.deleted[name] = self.certain.pop(name)
                self.pending.pop(name, None)
            case "create":
                self.certain[name] = bytearray()
                self.new.add(name)
                self.pending[name] = [operation]
            case _:
                self.pending.setdefault(name, []).append(operation)

    def everything(self) -> Image:
        """As a kill leaves it: the kernel goes on."""
        image = {name: bytearray(data) for name, data in self.certain.items()}
        for operations in self.pending.values():
            for operation in operations:
                _apply(image, operation)
        return {name: bytes(data) for name, data in image.items()}

    def nothing_more(self) -> Image:
        """Only what is certain."""
        return {name: bytes(data) for name, data in self.certain.items() if name not in self.new}

    def some(self, chance: random.Random) -> Image:
        """Any blocks, in any order; a name of a synced file that is new is there or not."""
        image = {name: bytearray(data) for name, data in self.certain.items()}
        image |= {name: bytearray(data) for name, data in self.deleted.items() if chance.random() < 0.5}
        for operations in self.pending.values():
            for operation in operations:
                for block in _blocks(operation):
                    if chance.random() < 0.5:
                        _apply(image, block)
        gone = {name for name in self.new if chance.random() < 0.5}
        return {name: bytes(data) for name, data in image.items() if name not in gone}


def _blocks(operation: Operation) -> Iterator[Operation]:
    if operation.kind != "write":
        yield operation
        return
    start = 0
    while start < len(operation.data):
        offset = operation.number + start
        end = min(start + BLOCK_BYTES - offset % BLOCK_BYTES, len(operation.data))
        yield Operation("write", operation.name, offset, operation.data[start:end])
        start = end
