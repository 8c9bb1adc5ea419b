"""Columns too large for a message are files named by their SHA-256, stored for as long as a sample names them.

absent → (upload, chunk by chunk) → partial → (the last chunk; checked, synced, renamed) → whole
partial → (its caller has left, and another upload needs the room) → absent
whole → (a put names it) → pinned → (the last sample that names it is deleted) → absent
pinned → (its file is missing or has other bytes) → damaged → (upload) → pinned
A column that no sample named within an hour is deleted, too. The samples' records say which columns they name.
All but reading and writing bytes happens on the event loop, so that a put finds what it has checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from headrace.api.sample.v1 import sample_pb2
from headrace.disk import sync
from headrace.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from headrace.limits import MAX_COLUMN_BYTES, MAX_UPLOADS
from headrace.rpc.log import log
from services.buffer.blocking import BlockingPool, paced
from services.buffer.ledger.group import Group, NewSample, SampleRecord
from services.buffer.store.base import CopiedFile, Damage

_READ_BYTES = 1 << 20
_ORPHAN_SECONDS = 3600.0
_ABANDONED_SECONDS = 60.0
"""An upload whose next chunk does not come for so long makes room for others."""
_FILE_NAME = re.compile(r"[0-9a-f]{64}(\.part|\.\d+\.deleted)?")
_THREADS = 4
_CHECKED_AT_START_SECONDS = 5.0
"""How long a start waits for the check of all columns; what is left is checked while it serves."""
_Answer = TypeVar("_Answer")
PART = ".part"
"""What the name of an unfinished file ends with."""
FileState = tuple[int, int, int]
"""(inode, bytes, change time in ns): other bytes in the file change it."""


async def _to_its_end(work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Runs the work to its end even when the caller is cancelled, so that no other write overlaps with it."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


@dataclass(slots=True)
class _Upload:
    """An unfinished upload. `num_bytes` is the announced size.

    It is None after a restart, and when its caller has left, until the size is announced again: meanwhile others may
    have the room.
    """

    num_bytes: int | None
    reserved_bytes: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Columns:
    """Files `folder`/SHA256 and `folder`/SHA256.part. Without a folder, uploads are refused."""

    def __init__(self, folder: Path | None, *, max_bytes: int = MAX_COLUMN_BYTES) -> None:
        """`max_bytes` limits all columns together; an unfinished upload counts with its announced size."""
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        self._maybe_folder = folder
        self._max_bytes = max_bytes
        self._pinned: defaultdict[str, deque[tuple[str, Sequence[bytes]]]] = defaultdict(deque)
        """Key of a sample → (its id, SHA-256 of its columns)."""
        self._counts: Counter[bytes] = Counter()
        self._whole: dict[bytes, int] = {}
        """SHA-256 → bytes."""
        self._checked: dict[bytes, FileState] = {}
        """SHA-256 → the state of the file when its bytes had that digest."""
        self._damaged: dict[bytes, str] = {}
        """SHA-256 → what is wrong with the column's file."""
        self._checking: asyncio.Task[None] | None = None
        self._uploads: dict[bytes, _Upload] = {}
        self._swept = time.monotonic()
        self._touched: dict[bytes, float] = {}
        """SHA-256 → when it was uploaded last, or first seen here. By the wall clock a jump would delete them."""
        self._num_pins_of_all = 0
        self._num_deleted = 0
        self._unlinking: set[asyncio.Future[None]] = set()
        self._pool = BlockingPool("columns", _THREADS)

    async def restore(self, groups: Iterable[Group]) -> None:
        """Loads the folder and pins the columns that the ledger's samples name."""
        if self._maybe_folder is None:
            return
        for path in filter(_is_ours, self._folder.iterdir()):
            if path.suffix == "":
                self._whole[bytes.fromhex(path.name)] = path.stat().st_size
            elif path.suffix == PART:
                self._uploads[bytes.fromhex(path.stem)] = _Upload(None, path.stat().st_size)
        for record in (record for group in groups for record in group.records if record.column_bytes):
            envelope = sample_pb2.SampleEnvelope.FromString(record.envelope)
            self.pin(record, [column.sha256 for column in envelope.out_of_line])
        await self._sweep()
        self._checking = asyncio.create_task(self._check_all())
        await asyncio.wait({self._checking}, timeout=_CHECKED_AT_START_SECONDS)

    def close(self) -> None:
        if self._checking:
            self._checking.cancel()

    # Damage

    async def _check_all(self) -> None:
        for sha256 in {**self._counts, **self._whole}:
            await self._is_intact(sha256)

    async def _is_intact(self, sha256: bytes) -> bool:
        """True when the column's file is there and has its bytes, which are read where the file has changed."""
        path = self._path(sha256)
        while (state := await self._pool.run(_state_of, path)) is not None:
            is_intact = self._checked.get(sha256) == state or await self._pool.run(_try_digest, path)
            if await self._pool.run(_state_of, path) == state:
                break
        if state is not None and is_intact:
            self._checked[sha256] = state
            if self._damaged.pop(sha256, None) is not None:
                self._whole[sha256] = path.stat().st_size
            return True
        if sha256 in self._whole or self._counts.get(sha256):
            self._note_damage(sha256, "is missing" if state is None else "does not have the bytes that were uploaded")
        return False

    def _note_damage(self, sha256: bytes, problem: str) -> None:
        if self._whole.pop(sha256, None) is not None or sha256 not in self._damaged:
            log.error("column_damaged", file=str(self._path(sha256)), problem=problem)
        self._damaged[sha256] = problem

    def damage(self) -> list[Damage]:
        """Returns every damaged column that a sample names, once for each such sample."""
        if not self._damaged:
            return []
        return [
            Damage(f"columns/{sha256.hex()} {self._damaged[sha256]}", key.rpartition("#")[0], sample_id)
            for key, pins in self._pinned.items()
            for sample_id, columns in pins
            for sha256 in columns
            if sha256 in self._damaged
        ]

    @property
    def num_bytes(self) -> int:
        """The bytes of all columns, unfinished uploads included."""
        return sum(self._whole.values()) + sum(upload.reserved_bytes for upload in self._uploads.values())

    # Uploads

    async def upload(self, sha256: bytes, num_bytes: int, offset: int, data: bytes) -> tuple[int, bool]:
        """Returns (next offset, True once the column is durable). Raises DataLoss when its digest differs."""
        self._touched[sha256] = time.monotonic()
        if time.monotonic() - self._swept > _ORPHAN_SECONDS:
            await self._sweep()
        if sha256 in self._whole and await self._is_intact(sha256):
            return self._again(sha256, num_bytes)
        upload = self._upload(sha256, num_bytes)
        try:
            async with upload.lock:
                if sha256 in self._whole:
                    return num_bytes, True
                return await _to_its_end(self._append(sha256, num_bytes, offset, data))
        except asyncio.CancelledError:
            upload.num_bytes = None
            raise

    async def _append(self, sha256: bytes, num_bytes: int, offset: int, data: bytes) -> tuple[int, bool]:
        try:
            answer = await self._pool.run(append_chunk, self._path(sha256), num_bytes, offset, data)
        except (DataLoss, OSError):
            self._uploads.pop(sha256, None)
            raise
        if answer[1]:
            self._uploads.pop(sha256, None)
            self._whole[sha256] = num_bytes
            self._damaged.pop(sha256, None)
            if (state := _state_of(self._path(sha256))) is not None:
                self._checked[sha256] = state
        return answer

    def _again(self, sha256: bytes, num_bytes: int) -> tuple[int, bool]:
        if self._whole[sha256] != num_bytes:
            raise InvalidArgument(
                f"column {sha256.hex()[:16]}… has {self._whole[sha256]} bytes, not {num_bytes}", field="num_bytes"
            )
        return num_bytes, True

    def _upload(self, sha256: bytes, num_bytes: int) -> _Upload:
        """Returns the unfinished upload, or starts a new one if there is room."""
        upload = self._uploads.get(sha256)
        if upload and upload.num_bytes not in (None, num_bytes):
            raise InvalidArgument(
                f"column {sha256.hex()[:16]}… is announced with {num_bytes} bytes, but was announced with "
                f"{upload.num_bytes} when its upload began",
                field="num_bytes",
            )
        if upload and upload.num_bytes == num_bytes:
            return upload
        upload = upload or _Upload(None, 0)
        self._make_room(upload, num_bytes - upload.reserved_bytes)
        upload.num_bytes = upload.reserved_bytes = num_bytes
        self._uploads[sha256] = upload
        return upload

    def _make_room(self, upload: _Upload, num_bytes: int) -> None:
        """Deletes uploads whose callers have left, the oldest first, as far as this one needs their room."""
        self._folder  # noqa: B018  # raises where there is none
        others = [sha256 for sha256, other in self._uploads.items() if other is not upload]
        ages = sorted((self._touched.get(sha256, 0.0), sha256) for sha256 in others)
        abandoned = iter([age for age in ages if self._is_abandoned(*age)])
        while refusal := self._refusal(upload, num_bytes):
            if (oldest := next(abandoned, None)) is None:
                raise refusal
            del self._uploads[oldest[1]]
            self._unlink(self._path(oldest[1]).with_suffix(PART))

    def _is_abandoned(self, touched: float, sha256: bytes) -> bool:
        upload = self._uploads[sha256]
        has_left = upload.num_bytes is None or time.monotonic() - touched > _ABANDONED_SECONDS
        return has_left and not upload.lock.locked()

    def _refusal(self, upload: _Upload, num_bytes: int) -> ResourceExhausted | None:
        num_others = sum(one is not upload for one in self._uploads.values())
        if num_others >= MAX_UPLOADS:
            return ResourceExhausted(
                f"{num_others} uploads of columns are unfinished, which is the limit: finish some, or wait "
                f"{_ABANDONED_SECONDS:g} s until abandoned ones may be deleted",
                retry_after_seconds=5.0,
            )
        if self.num_bytes + num_bytes > self._max_bytes:
            return ResourceExhausted(
                f"columns hold {self.num_bytes} bytes, {num_bytes} more exceed {self._max_bytes} (max_payload_bytes): "
                "raise it, or save checkpoints more often",
                retry_after_seconds=1.0,
            )
        return None

    # What samples name

    def require(self, samples: Iterable[NewSample]) -> None:
        """Raises FailedPrecondition for a missing column, InvalidArgument for one of another size."""
        for sample in samples:
            if not sample.columns:
                continue
            for column in sample_pb2.SampleEnvelope.FromString(sample.record.envelope).out_of_line:
                named = f"sample {sample.record.sample_id} names the column {column.sha256.hex()[:16]}…"
                num_bytes = self._whole.get(column.sha256)
                if num_bytes is None:
                    raise FailedPrecondition(
                        f"{named}, which was not uploaded: call UploadColumn before the put", reason="COLUMN_MISSING"
                    )
                if num_bytes != column.num_bytes:
                    raise InvalidArgument(
                        f"{named} with {column.num_bytes} bytes, but {num_bytes} bytes were uploaded: give the "
                        "column's length as num_bytes",
                        field="samples.envelope.out_of_line",
                    )

    def pin(self, record: SampleRecord, columns: Sequence[bytes]) -> None:
        if columns:
            self._pinned[record.key].append((record.sample_id, columns))
            self._counts.update(columns)

    def release(self, keys: Iterable[str]) -> None:
        """Unpins the columns of samples whose deletion is durable."""
        for key in keys:
            if key not in self._pinned:
                continue
            _, columns = self._pinned[key].popleft()
            if not self._pinned[key]:
                del self._pinned[key]
            for sha256 in columns:
                self._counts[sha256] -= 1
                if not self._counts[sha256]:
                    self._delete(sha256)

    def _delete(self, sha256: bytes) -> None:
        if self._num_pins_of_all:
            return
        del self._counts[sha256]
        self._checked.pop(sha256, None)
        is_damaged = self._damaged.pop(sha256, None) is not None
        if self._whole.pop(sha256, None) is not None or is_damaged:
            self._unlink(self._path(sha256))

    def _unlink(self, path: Path) -> None:
        """Out of the way at once, so that it may be brought again; to free a large file takes its time."""
        self._num_deleted += 1
        gone = path.with_suffix(f".{self._num_deleted}.deleted")
        try:
            path.rename(gone)
        except FileNotFoundError:  # nothing of it was written yet, or the file is what is damaged
            return
        unlinking = asyncio.ensure_future(self._pool.run(gone.unlink))
        self._unlinking.add(unlinking)
        unlinking.add_done_callback(self._unlinking.discard)

    # Readers

    async def read(self, sha256: bytes, offset: int, num_bytes: int | None) -> AsyncIterator[tuple[int, bytes]]:
        """Yields (offset, bytes) of a range, in chunks. Raises NotFound, and DataLoss for a damaged column."""
        if not await self._is_intact(sha256):
            self._raise_missing(sha256)
        try:
            file = await self._pool.run(self._path(sha256).open, "rb")
        except FileNotFoundError:  # deleted since it was checked
            self._raise_missing(sha256)
        with file:
            end = os.fstat(file.fileno()).st_size
            end = end if num_bytes is None else min(end, offset + num_bytes)
            while offset < end:
                data = await self._pool.run(os.pread, file.fileno(), min(_READ_BYTES, end - offset), offset)
                yield offset, data
                offset += len(data)

    def _raise_missing(self, sha256: bytes) -> NoReturn:
        name = f"{sha256.hex()[:16]}…"
        if sha256 not in self._damaged:
            raise NotFound(f"there is no column {name}: it was never uploaded, or was deleted with its samples")
        damage = next((damage for damage in self.damage() if damage.what.startswith(f"columns/{sha256.hex()}")), None)
        named = f" of sample {damage.sample_id}" if damage else ""
        options = f" --group {damage.group_id}" if damage else ""
        raise DataLoss(
            f"the file of column {name}{named} {self._damaged[sha256]}: upload the column again, or take its group out "
            f"with headrace buffer drop{options} --reason damaged"
        )

    def pin_all(self) -> None:
        """Delays all deletions until `unpin_all`, while the ledger is copied."""
        self._num_pins_of_all += 1

    def unpin_all(self) -> None:
        """Deletes the columns whose last sample was deleted meanwhile."""
        self._num_pins_of_all -= 1
        for sha256 in [sha256 for sha256, count in self._counts.items() if not count]:
            self._delete(sha256)

    def files(self) -> list[CopiedFile]:
        """Returns the files of all columns that samples name. It may run in a thread."""
        paths = [path for sha256 in list(self._counts) if (path := self._path(sha256)).exists()]
        return [CopiedFile(f"columns/{path.name}", path, path.stat().st_size) for path in paths]

    async def _sweep(self) -> None:
        """Deletes columns that no sample named in time."""
        now = self._swept = time.monotonic()
        before, self._touched = self._touched, {}
        async for path in paced(await self._pool.run(lambda: list(filter(_is_ours, self._folder.iterdir())))):
            sha256 = bytes.fromhex(path.name.partition(".")[0])
            touched = self._touched.setdefault(sha256, before.get(sha256, now))
            if now - touched <= _ORPHAN_SECONDS or (path.suffix == "" and sha256 in self._counts):
                continue
            if path.suffix == "":
                self._whole.pop(sha256, None)
                self._checked.pop(sha256, None)
                self._damaged.pop(sha256, None)
            elif path.suffix == PART:
                self._uploads.pop(sha256, None)
            path.unlink(missing_ok=True)

    @property
    def _folder(self) -> Path:
        if self._maybe_folder is None:
            raise FailedPrecondition("this buffer stores everything in memory and accepts no columns out of line")
        return self._maybe_folder

    def _path(self, sha256: bytes) -> Path:
        return self._folder / sha256.hex()


def _try_digest(path: Path) -> bool:
    """False where the file has other bytes, is gone or cannot be read."""
    try:
        return _has_digest(path)
    except OSError:
        return False


def _is_ours(path: Path) -> bool:
    """False for files that an operator left in the folder; they stay as they are."""
    return _FILE_NAME.fullmatch(path.name) is not None and path.is_file()


# The file of one column has its name, the SHA-256 of its bytes, once all of it is on the disk. These block.


def _state_of(path: Path) -> FileState | None:
    """Returns None where there is no file. Blocks."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_ctime_ns


def _has_digest(path: Path) -> bool:
    """True when the file's bytes have the SHA-256 in its name. Blocks. Raises FileNotFoundError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == path.name


def append_chunk(path: Path, num_bytes: int, offset: int, data: bytes) -> tuple[int, bool]:
    """Returns (next offset, True once all `num_bytes` are durable under `path`). Blocks.

    A chunk behind the end of the file changes nothing, and what the file has already is not written again. Raises
    InvalidArgument for more bytes than `num_bytes`, and DataLoss for others than the name says, which are deleted.
    """
    part = path.with_suffix(PART)
    with part.open("ab") as file:
        size = file.tell()
        if offset > size or not (data or size == num_bytes):
            return size, False
        new = data[size - offset :]
        if size + len(new) > num_bytes:
            raise InvalidArgument(
                f"column {path.name[:16]}… was announced with {num_bytes} bytes, but {size + len(new)} came",
                field="num_bytes",
            )
        file.write(new)
        file.flush()
        if size + len(new) < num_bytes:
            return size + len(new), False
        os.fdatasync(file.fileno())
    _finish(part, path)
    return num_bytes, True


def _finish(part: Path, path: Path) -> None:
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != path.name:
        part.unlink()
        raise DataLoss(f"the column's bytes have the SHA-256 {found[:16]}…, not {path.name[:16]}…")
    part.rename(path)
    sync(path.parent)
