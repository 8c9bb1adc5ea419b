"""Large payloads pass the page cache by: the same bytes come back, whatever their offsets and lengths."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.buffer.store import direct_io
from services.buffer.store.direct_io import DirectIo, open_direct
from services.buffer.store.files import LARGE_BYTES, Buffer, DiskFiles

BLOCK, BUFFER = 4096, 64 << 10


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a write takes several of them."""
    monkeypatch.setattr(direct_io, "_BUFFER_BYTES", BUFFER)


def past_cache(path: Path) -> int:
    descriptor = open_direct(path)
    if descriptor is None:
        pytest.skip(f"the file system of {path} has no transfers past the page cache")
    return descriptor


@pytest.mark.parametrize("seed", range(20))
def test_writes_one_behind_the_other_come_back_as_they_were_written(tmp_path: Path, seed: int) -> None:
    pick, path, io = random.Random(seed), tmp_path / "file", DirectIo()
    path.touch()
    cached, direct = os.open(path, os.O_RDWR), past_cache(path)
    lengths = [0, 1, 16, BLOCK - 1, BLOCK, BLOCK + 1, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER + 5]
    expected = b""
    for _ in range(6):
        parts = [pick.randbytes(pick.choice(lengths)) for _ in range(pick.randrange(1, 5))]
        io.write(cached, direct, len(expected), [memoryview(part) for part in parts])
        expected += b"".join(parts)
        assert path.read_bytes() == expected
    for _ in range(20):
        offset, num_bytes = pick.randrange(len(expected) + 1), pick.choice([*lengths, len(expected)])
        assert io.read(direct, offset, num_bytes) == expected[offset : offset + num_bytes]


def test_no_block_with_earlier_bytes_is_written_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, io, pwrite = tmp_path / "file", DirectIo(), os.pwrite
    path.touch()
    cached, direct = os.open(path, os.O_RDWR), past_cache(path)
    written: list[tuple[int, int]] = []

    def seen(descriptor: int, data: Buffer, offset: int) -> int:
        if descriptor == direct:
            written.append((offset, len(data)))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", seen)
    end = 0
    for length in (BLOCK + 100, 3 * BLOCK, BUFFER + 77, 10, 2 * BUFFER):
        written.clear()
        io.write(cached, direct, end, [bytes(length)])
        assert all(offset >= end and offset % BLOCK == 0 == length % BLOCK for offset, length in written)
        end += length
        assert all(offset + length <= end for offset, length in written)


@pytest.mark.parametrize("refused", ["open", "pwrite", "preadv"])
def test_a_disk_that_does_no_such_transfers_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    payload = os.urandom(LARGE_BYTES + 3)
    real = getattr(os, refused)

    def refuse(where: int | Path, *arguments: object) -> object:
        flags = arguments[0] if refused == "open" else _flags(where)
        if isinstance(flags, int) and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(where, *arguments)

    monkeypatch.setattr(os, refused, refuse)
    files = DiskFiles(tmp_path)
    files.create("file")
    _write_and_read(files, [b"header", payload])
    _write_and_read(files, [b"header", payload])


def test_a_disk_that_is_full_is_not_taken_for_one_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DiskFiles(tmp_path)
    files.create("file")
    past_cache(tmp_path / "file")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        files.write("file", 0, [bytes(LARGE_BYTES)])


def _flags(descriptor: object) -> int:
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("flags:")), 8)


def _write_and_read(files: DiskFiles, parts: Sequence[bytes]) -> None:
    files.write("file", 5, parts)
    files.sync("file")
    data = b"".join(parts)
    assert files.read("file", 5, len(data)) == data
