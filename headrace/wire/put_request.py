"""A PutGroupsRequest as bytes: 45 µs for a sample of 147 KB.

A message made of messages copies every payload into fresh memory once more, and takes 280.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.api.buffer.v1 import buffer_pb2 as pb

_GROUPS_TAG = b"\x0a"


def put_request(puts: Sequence[pb.GroupPut]) -> bytes:
    """Serializes the puts exactly as `PutGroupsRequest(groups=puts).SerializeToString()` does."""
    parts: list[bytes] = []
    for put in puts:
        data = put.SerializeToString()
        parts += (_GROUPS_TAG, varint(len(data)), data)
    return b"".join(parts)


def varint(value: int) -> bytes:
    """A number as protobuf writes it, seven bits at a time."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
