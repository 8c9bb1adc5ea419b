"""Files that tell of the points at which a kill could come: before, in and after each durable operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.protobuf import Payload
from services.buffer.store.payload_files import DiskFiles

OnPoint = Callable[[str], None]


class ToldFiles(DiskFiles):
    """Real files; a write is one of its first half and then one of the whole."""

    def __init__(self, folder: Path, on_point: OnPoint) -> None:
        super().__init__(folder)
        self._on_point = on_point

    def create(self, name: str) -> None:
        self._on_point("create")
        super().create(name)
        self._on_point("created")

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        self._on_point("write")
        whole = b"".join(parts)
        super().write(name, [whole[: len(whole) // 2]])
        self._on_point("half-written")
        super().write(name, parts)
        self._on_point("written")

    def sync(self, name: str) -> None:
        super().sync(name)
        self._on_point("synced")

    def sync_folder(self) -> None:
        super().sync_folder()
        self._on_point("folder-synced")

    def delete(self, name: str) -> None:
        self._on_point("delete")
        super().delete(name)
        self._on_point("deleted")
