"""The values of tensors that changed since a version that the reader has: bits, not differences, so nothing is rounded.

A delta is one zstd frame: the length of a header in four bytes, the header, all positions, all values. The header is
JSON and says each tensor's name, dtype, shape and number of changed values. A position is the distance from the changed
value before it. Numbers lie in planes: first the lowest byte of each, then the next one. Most high bytes are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from headrace.errors import InvalidArgument
from headrace.publication import ITEM_BYTES

PREFIX = "headrace.delta."
"""A tensor of this name is a delta: uint8, shape [bytes]."""

_LEVEL = 1
"""Of zstd. Level 3 takes twice the time and makes deltas no smaller."""

_HEADER_BYTES = 4
_POSITION_BYTES = 4


@dataclass(frozen=True, slots=True)
class Change:
    """The changed values of a tensor in C order: their positions, rising, and their bits as unsigned integers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    positions: NDArray[Any]
    bits: NDArray[Any]


def pack(changes: Iterable[Change]) -> bytes:
    """One delta; tensors without changes are left out."""
    changes = [change for change in changes if change.positions.size]
    header = json.dumps([[c.name, c.dtype, c.shape, c.positions.size] for c in changes]).encode()
    distances = [np.diff(change.positions, prepend=0).astype(np.uint32) for change in changes]
    parts = [len(header).to_bytes(_HEADER_BYTES, "little"), header, _planes(distances, _POSITION_BYTES)]
    parts += [_planes(bits, size) for size, bits in _by_size(changes).items()]
    return zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(parts))


def unpack(delta: bytes, most_bytes: int) -> list[Change]:
    """Raises InvalidArgument for bytes that are not a delta, or that unpack to more than `most_bytes`."""
    try:
        if (num_bytes := zstandard.frame_content_size(delta)) > most_bytes:
            raise InvalidArgument(f"a delta of {num_bytes:,} bytes for a model of {most_bytes:,}: send the whole")
        content = memoryview(zstandard.ZstdDecompressor().decompress(delta))
        end = _HEADER_BYTES + int.from_bytes(content[:_HEADER_BYTES], "little")
        changes = [
            Change(name, dtype, tuple(shape), np.empty(size, np.uint32), np.empty(size, f"u{ITEM_BYTES[dtype]}"))
            for name, dtype, shape, size in json.loads(bytes(content[_HEADER_BYTES:end]))
        ]
        arrays = [([change.positions for change in changes], _POSITION_BYTES)]
        arrays += [(bits, size) for size, bits in _by_size(changes).items()]
        for outs, size in arrays:
            start, end = end, end + size * sum(out.size for out in outs)
            _from_planes(content[start:end], outs, size)
    except (zstandard.ZstdError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"the bytes of a delta cannot be read: {error!s:.100}") from error
    for change in changes:
        np.cumsum(change.positions, out=change.positions)
    return changes


def _by_size(changes: Iterable[Change]) -> dict[int, list[NDArray[Any]]]:
    """The bits of all tensors, by their bytes a value."""
    found: dict[int, list[NDArray[Any]]] = {}
    for change in changes:
        found.setdefault(change.bits.dtype.itemsize, []).append(change.bits)
    return found


def _planes(arrays: list[NDArray[Any]], size: int) -> bytes:
    numbers = np.concatenate(arrays) if arrays else np.empty(0, f"u{size}")
    return numbers.astype(f"<u{size}").view(np.uint8).reshape(-1, size).T.tobytes()


def _from_planes(planes: memoryview, outs: list[NDArray[Any]], size: int) -> None:
    *lower, highest = np.frombuffer(planes, np.uint8).reshape(size, -1)
    numbers = highest.astype(f"u{size}")
    for plane in reversed(lower):
        numbers <<= 8
        numbers |= plane
    start = 0
    for out in outs:
        out[:] = numbers[start : start + out.size]
        start += out.size
