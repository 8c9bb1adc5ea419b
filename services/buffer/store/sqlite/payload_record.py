"""A payload file: a header (magic, version, id, checksum), then records (checksum, two lengths, key, payload).

The CRC-32C of a record covers its lengths, key and payload and starts from the file's id: a record of another file, or
bytes that a producer put, are never taken for one.
"""

from __future__ import annotations

import struct

from crc32c import crc32c

from services.buffer.store.files import Buffer

FILE_ID_BYTES = 16
_MAGIC = b"hrPAYLDS"
_VERSION = 1
_FILE_HEADER = struct.Struct(f"<8sI{FILE_ID_BYTES}sI")
_RECORD_HEADER = struct.Struct("<IIQ")
_LENGTHS = struct.Struct("<IQ")
FILE_HEADER_BYTES = _FILE_HEADER.size


def file_header(file_id: bytes) -> bytes:
    checked = struct.pack(f"<8sI{FILE_ID_BYTES}s", _MAGIC, _VERSION, file_id)
    return checked + struct.pack("<I", crc32c(checked))


def is_header_of(file_id: bytes, data: bytes) -> bool:
    return data == file_header(file_id)


def record_header(file_id: bytes, key: bytes, payload: Buffer) -> tuple[bytes, int]:
    """Returns (the bytes in front of a payload, i.e. header and key; the record's checksum)."""
    crc = _checksum(file_id, key, payload)
    return _RECORD_HEADER.pack(crc, len(key), len(payload)) + key, crc


def record_bytes(key: bytes, payload_bytes: int) -> int:
    return _RECORD_HEADER.size + len(key) + payload_bytes


def read_record(data: memoryview, file_id: bytes, key: bytes, payload_bytes: int, crc: int) -> memoryview | None:
    """Returns the payload of the record in `data`; None unless it is whole and the one that was asked for."""
    if len(data) != record_bytes(key, payload_bytes):
        return None
    start = _RECORD_HEADER.size + len(key)
    if data[:start] != _RECORD_HEADER.pack(crc, len(key), payload_bytes) + key:
        return None
    payload = data[start:]
    return payload if _checksum(file_id, key, payload) == crc else None


def _checksum(file_id: bytes, key: bytes, payload: Buffer) -> int:
    return int(crc32c(payload, crc32c(file_id + _LENGTHS.pack(len(key), len(payload)) + key)))
