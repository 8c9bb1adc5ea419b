"""Columns too large for a message: files named by their SHA-256, kept for as long as a sample names them.

absent → (upload, piece by piece) → partial → (the last piece; checked, synced, renamed) → whole
whole → (a put names it) → held → (the last sample that names it is deleted) → absent
What nobody named within an hour is deleted too. Who names what is not written here: the samples' records say it.
All but the reading and writing of bytes happens on the event loop, so that a put finds what it has checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from services.buffer.group import Group
from services.buffer.store.copy import CopiedFile
from services.buffer.work import NewSample

_READ_BYTES = 1 << 20
_ORPHAN_SECONDS = 3600.0
_DIGEST_BYTES = 32


class Columns:
    """`folder`/SHA256 and `folder`/SHA256.part. Without a folder it takes none."""

    def __init__(self, folder: Path | None) -> None:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        self._maybe_folder = folder
        self._held: defaultdict[str, deque[tuple[bytes, ...]]] = defaultdict(deque)
        self._counts: Counter[bytes] = Counter()
        self._uploads: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._swept = time.time()
        self._num_keepers = 0

    def restore(self, groups: Iterable[Group]) -> None:
        """What the ledger's samples name is held again."""
        if self._maybe_folder is None or not any(self._folder.iterdir()):
            return
        for group in groups:
            for record in group.records:
                envelope = sample_pb2.SampleEnvelope.FromString(record.envelope)
                self.hold(record.key, [column.sha256 for column in envelope.out_of_line])
        self._sweep()

    # Uploads

    async def upload(self, sha256: bytes, num_bytes: int, offset: int, data: bytes) -> tuple[int, bool]:
        """(where to go on, whether it is whole and durable). Raises DataLoss when it has another digest."""
        if len(sha256) != _DIGEST_BYTES:
            raise InvalidArgument(f"sha256 has {len(sha256)} bytes, must have {_DIGEST_BYTES}", field="sha256")
        if time.time() - self._swept > _ORPHAN_SECONDS:
            self._sweep()
        lock = self._uploads[sha256]
        async with lock:
            if self._path(sha256).exists():
                os.utime(self._path(sha256))  # not an orphan yet
                answer = num_bytes, True
            else:
                answer = await asyncio.to_thread(self._write, sha256, num_bytes, offset, data)
        if answer[1]:
            self._uploads.pop(sha256, None)
        return answer

    def _write(self, sha256: bytes, num_bytes: int, offset: int, data: bytes) -> tuple[int, bool]:
        part = self._path(sha256).with_suffix(".part")
        with part.open("ab") as file:
            size = file.tell()
            if offset > size or not (data or size == num_bytes):
                return size, False
            new = data[size - offset :]
            if size + len(new) > num_bytes:
                raise InvalidArgument(
                    f"column {sha256.hex()[:16]}… is said to have {num_bytes} bytes, {size + len(new)} came",
                    field="num_bytes",
                )
            file.write(new)
            file.flush()
            if size + len(new) < num_bytes:
                return size + len(new), False
            os.fdatasync(file.fileno())
        self._finish(part, sha256)
        return num_bytes, True

    def _finish(self, part: Path, sha256: bytes) -> None:
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").digest()
        if found != sha256:
            part.unlink()
            raise DataLoss(f"the column's bytes have the SHA-256 {found.hex()[:16]}…, not {sha256.hex()[:16]}…")
        part.rename(self._path(sha256))
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # What samples name

    def require(self, samples: Iterable[NewSample]) -> None:
        """Raises FailedPrecondition for a column that is not here."""
        for sample in samples:
            for sha256 in sample.columns:
                if len(sha256) != _DIGEST_BYTES or not self._path(sha256).exists():
                    raise FailedPrecondition(
                        f"sample {sample.record.sample_id} names the column {sha256.hex()[:16]}…, which is not here: "
                        "UploadColumn brings it before the put",
                        reason="COLUMN_MISSING",
                    )

    def hold(self, key: str, columns: Sequence[bytes]) -> None:
        """The sample that is kept under this key names them."""
        if columns:
            self._held[key].append(tuple(columns))
            self._counts.update(columns)

    def release(self, keys: Iterable[str]) -> None:
        """The samples under these keys are deleted, durably."""
        for key in keys:
            if key not in self._held:
                continue
            columns = self._held[key].popleft()
            if not self._held[key]:
                del self._held[key]
            for sha256 in columns:
                self._counts[sha256] -= 1
                if not self._counts[sha256]:
                    self._delete(sha256)

    def _delete(self, sha256: bytes) -> None:
        if not self._num_keepers:
            del self._counts[sha256]
            self._path(sha256).unlink(missing_ok=True)

    # Readers

    async def read(self, sha256: bytes, offset: int, num_bytes: int | None) -> AsyncIterator[tuple[int, bytes]]:
        """(offset, bytes) of a range, some at a time. Raises NotFound."""
        try:
            file = self._path(sha256).open("rb")
        except FileNotFoundError as error:
            raise NotFound(
                f"there is no column {sha256.hex()[:16]}…: it was never brought, or deleted with its samples"
            ) from error
        with file:
            end = os.fstat(file.fileno()).st_size
            end = end if num_bytes is None else min(end, offset + num_bytes)
            file.seek(offset)
            while offset < end:
                data = await asyncio.to_thread(file.read, min(_READ_BYTES, end - offset))
                yield offset, data
                offset += len(data)

    def keep_all(self) -> None:
        """Nothing is deleted until `keep_no_more`: somebody copies the ledger."""
        self._num_keepers += 1

    def keep_no_more(self) -> None:
        """What lost its last sample meanwhile is deleted now."""
        self._num_keepers -= 1
        for sha256 in [sha256 for sha256, count in self._counts.items() if not count]:
            self._delete(sha256)

    def files(self) -> list[CopiedFile]:
        """Of all columns that samples name."""
        paths = [path for sha256 in self._counts if (path := self._path(sha256)).exists()]
        return [CopiedFile(f"columns/{path.name}", path, path.stat().st_size) for path in paths]

    def _sweep(self) -> None:
        """Deletes what nobody has named in time."""
        self._swept = time.time()
        for path in self._folder.iterdir():
            is_held = path.suffix == "" and bytes.fromhex(path.name) in self._counts
            if not is_held and self._swept - path.stat().st_mtime > _ORPHAN_SECONDS:
                path.unlink()

    @property
    def _folder(self) -> Path:
        if self._maybe_folder is None:
            raise FailedPrecondition("this buffer keeps everything in memory, and takes no columns out of line")
        return self._maybe_folder

    def _path(self, sha256: bytes) -> Path:
        return self._folder / sha256.hex()
