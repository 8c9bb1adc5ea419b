"""Reads and writes protobuf messages without their generated classes: single fields, and the samples of a put."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.limits import (
    MAX_ENVELOPE_BYTES,
    MAX_GROUP_ENVELOPE_BYTES,
    require_bytes,
)

Payload = bytes | memoryview
"""A memoryview is a slice of the request it came in, or of the record it was read from."""


@lru_cache(1 << 14)
def varint(value: int) -> bytes:
    """A number as protobuf writes it, seven bits at a time."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(number: int, data: bytes) -> bytes:
    """A field of bytes, a string or a message, as it stands in a message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def fields(data: Payload, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (tag, where the field starts, where its contents do, where both end).

    A tag is number and wire type: a field of another type than its own is an unknown one. Raises ValueError or
    IndexError for what is not protobuf.
    """
    while at < end:
        start = at
        tag, at = (data[at], at + 1) if data[at] < 0x80 else read_varint(data, at)
        contents = at
        match tag & 7:
            case 2:  # bytes
                length, contents = (data[at], at + 1) if data[at] < 0x80 else read_varint(data, at)
                at = contents + length
            case 0:  # a number
                _, at = read_varint(data, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case kind:
                raise ValueError(f"wire type {kind}")
        if at > end:
            raise ValueError("cut off")
        if not 8 <= tag < 1 << 32:
            raise ValueError(f"tag {tag}")
        yield tag, start, contents, at


def read_varint(data: Payload, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("a number without end")


# A PutGroupsRequest as bytes, for both ends: clients write it and the buffer reads it; few payloads are copied.
#
# A generated message copies every payload into fresh memory three times on its way out, and twice on its way in. Here
# large payloads are joined to a request (0.3 ms for a sample of a megabyte, not 1.8). The reader goes from field to
# field: payloads stay slices of the request, and envelopes are bytes that are parsed later.

_GROUPS_TAG = b"\x0a"  # field 1 of PutGroupsRequest, length-delimited as all of these
_SAMPLES_TAG = b"\x22"  # field 4 of GroupPut
_ENVELOPE_TAG = b"\x0a"  # field 1 of Sample
_PAYLOAD_TAG = b"\x12"  # field 2 of it
_GROUPS, _SAMPLES, _ENVELOPE, _PAYLOAD = _GROUPS_TAG[0], _SAMPLES_TAG[0], _ENVELOPE_TAG[0], _PAYLOAD_TAG[0]
_LARGE_BYTES = 128 << 10
"""A put whose first payload has this size or more is not serialized as a whole."""


class RawSample(msgspec.Struct, frozen=True, gc=False):
    """A sample of a request, not parsed yet."""

    envelope: bytes
    payload: Payload


class RawPut(msgspec.Struct, frozen=True, gc=False):
    """A GroupPut; `rest` is all of it but its samples."""

    rest: pb.GroupPut
    samples: tuple[RawSample, ...]


def put_request(puts: Sequence[pb.GroupPut]) -> bytes:
    """Serializes the puts exactly as `PutGroupsRequest(groups=puts).SerializeToString()` does."""
    parts: list[bytes] = []
    for put in puts:
        data = _put_parts(put) if _is_large(put) else [put.SerializeToString()]
        parts += (_GROUPS_TAG, varint(sum(map(len, data))), *data)
    return b"".join(parts)


def _is_large(put: pb.GroupPut) -> bool:
    return bool(put.samples) and put.samples[0].envelope.payload_bytes >= _LARGE_BYTES


def _put_parts(put: pb.GroupPut) -> list[bytes]:
    """The fields in the order of their numbers."""
    head = pb.GroupPut(lease_id=put.lease_id, group_id=put.group_id, outcome=put.outcome)
    tail = pb.GroupPut(failure=put.failure if put.HasField("failure") else None, rewards=put.rewards)
    return [
        head.SerializeToString(),
        *(part for s in put.samples for part in _sample_parts(s)),
        tail.SerializeToString(),
    ]


def _sample_parts(sample: sample_pb2.Sample) -> tuple[bytes, ...]:
    envelope, payload = sample.envelope.SerializeToString(), sample.payload
    front = (_ENVELOPE_TAG, varint(len(envelope)), envelope) if sample.HasField("envelope") else ()
    back = (_PAYLOAD_TAG, varint(len(payload)), payload) if payload else ()
    return _SAMPLES_TAG, varint(sum(map(len, front + back))), *front, *back


def parse_puts(data: bytes) -> list[RawPut]:
    """A PutGroupsRequest. Raises DecodeError as its generated class does, InvalidArgument for too many envelopes."""
    try:
        puts = [_put(data, start, end) for tag, _, start, end in fields(data, 0, len(data)) if tag == _GROUPS]
    except (IndexError, ValueError):  # not protobuf, or not as every encoder writes it
        puts = [raw_put(put) for put in pb.PutGroupsRequest.FromString(data).groups]
    envelope_bytes = sum(len(sample.envelope) for put in puts for sample in put.samples)
    require_bytes(envelope_bytes, MAX_GROUP_ENVELOPE_BYTES, "groups.samples.envelope")
    return puts


def raw_put(message: pb.GroupPut) -> RawPut:
    """Takes a put apart that was parsed as a message."""
    rest = pb.GroupPut()
    rest.CopyFrom(message)
    rest.ClearField("samples")
    return RawPut(rest, tuple(RawSample(s.envelope.SerializeToString(), s.payload) for s in message.samples))


def _put(data: bytes, start: int, end: int) -> RawPut:
    samples: list[RawSample] = []
    rest: list[bytes] = []
    view = memoryview(data)
    for tag, field, contents, stop in fields(data, start, end):
        if tag == _SAMPLES:
            samples.append(_sample(data, view, contents, stop))
        else:
            rest.append(data[field:stop])
    return RawPut(pb.GroupPut.FromString(b"".join(rest)), tuple(samples))


def _sample(data: bytes, view: memoryview, start: int, end: int) -> RawSample:
    """Most are an envelope and a payload, in this order; any other order of fields is read one by one."""
    if start < end and data[start] == _ENVELOPE:
        length, envelope_at = read_varint(data, start + 1)
        envelope_end = envelope_at + length
        if envelope_end < end and data[envelope_end] == _PAYLOAD:
            length, payload_at = read_varint(data, envelope_end + 1)
            if payload_at + length == end:
                require_bytes(envelope_end - envelope_at, MAX_ENVELOPE_BYTES, "groups.samples.envelope")
                return RawSample(data[envelope_at:envelope_end], view[payload_at:end])
    return _sample_of_fields(data, view, start, end)


def _sample_of_fields(data: bytes, view: memoryview, start: int, end: int) -> RawSample:
    envelope: bytes | None = None
    payload: Payload | None = None
    for tag, _, contents, stop in fields(data, start, end):
        if tag == _ENVELOPE and envelope is None:
            require_bytes(stop - contents, MAX_ENVELOPE_BYTES, "groups.samples.envelope")
            envelope = data[contents:stop]
        elif tag == _PAYLOAD and payload is None:
            payload = view[contents:stop]
        elif tag in (_ENVELOPE, _PAYLOAD):
            raise ValueError(f"field {tag >> 3} comes twice: the generated class knows how to merge them")
    return RawSample(envelope or b"", b"" if payload is None else payload)
