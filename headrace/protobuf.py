"""Reads and writes protobuf messages without their generated classes: single fields, samples of a put, field counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.limits import (
    MAX_ENVELOPE_BYTES,
    MAX_GROUP_ENVELOPE_BYTES,
    MAX_PUT_SAMPLES_PER_CALL,
    MAX_PUTS_PER_CALL,
    require_at_most,
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

_PARSED_BYTES = 256 << 10
"""A larger request is read field by field and never parsed as a whole: many small parts cost memory and time."""
_REST_BYTES = 4 << 20
"""All puts of a request without their samples: two ids and a failure each."""
_MOST_FIELDS = 64
"""Fields of a put without its samples, and of a sample, unknown fields included."""
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
    """A PutGroupsRequest. Raises DecodeError as its generated class does, InvalidArgument for too many parts."""
    try:
        return _puts(data)
    except (IndexError, ValueError) as error:  # not protobuf, or not as every encoder writes it
        if len(data) > _PARSED_BYTES:
            raise DecodeError(f"{error}: encode the request with protobuf") from error
        return [raw_put(put) for put in pb.PutGroupsRequest.FromString(data).groups]


def _puts(data: bytes) -> list[RawPut]:
    puts: list[RawPut] = []
    num_samples = envelope_bytes = rest_bytes = 0
    for count, (tag, _, start, end) in enumerate(fields(data, 0, len(data)), 1):
        require_at_most(count, MAX_PUTS_PER_CALL, "groups")
        if tag == _GROUPS:
            put, num_bytes = _put(data, start, end, MAX_PUT_SAMPLES_PER_CALL - num_samples, _REST_BYTES - rest_bytes)
            num_samples += len(put.samples)
            envelope_bytes += sum([len(sample.envelope) for sample in put.samples])
            require_bytes(envelope_bytes, MAX_GROUP_ENVELOPE_BYTES, "groups.samples.envelope")
            rest_bytes += num_bytes
            puts.append(put)
    return puts


def raw_put(message: pb.GroupPut) -> RawPut:
    """Takes a put apart that was parsed as a message."""
    rest = pb.GroupPut()
    rest.CopyFrom(message)
    rest.ClearField("samples")
    return RawPut(rest, tuple(RawSample(s.envelope.SerializeToString(), s.payload) for s in message.samples))


def _put(data: bytes, start: int, end: int, most_samples: int, most_bytes: int) -> tuple[RawPut, int]:
    """Returns the put, and how many bytes it has besides its samples (at most `most_bytes`)."""
    samples: list[RawSample] = []
    rest: list[bytes] = []
    num_bytes = 0
    view = memoryview(data)
    for tag, field, contents, stop in fields(data, start, end):
        if tag == _SAMPLES:
            require_at_most(len(samples) + 1, most_samples, "groups.samples")
            samples.append(_sample(data, view, contents, stop))
        else:
            require_at_most(len(rest) + 1, _MOST_FIELDS, "groups")
            num_bytes += stop - field
            require_bytes(num_bytes, most_bytes, "groups without their samples")
            rest.append(data[field:stop])
    return RawPut(pb.GroupPut.FromString(b"".join(rest)), tuple(samples)), num_bytes


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
    for count, (tag, _, contents, stop) in enumerate(fields(data, start, end)):
        require_at_most(count, _MOST_FIELDS, "groups.samples")
        if tag == _ENVELOPE and envelope is None:
            require_bytes(stop - contents, MAX_ENVELOPE_BYTES, "groups.samples.envelope")
            envelope = data[contents:stop]
        elif tag == _PAYLOAD and payload is None:
            payload = view[contents:stop]
        elif tag in (_ENVELOPE, _PAYLOAD):
            raise ValueError(f"field {tag >> 3} comes twice: the generated class knows how to merge them")
    return RawSample(envelope or b"", b"" if payload is None else payload)


# Counts the fields of a request before it is parsed.
#
# An empty message costs two bytes on the wire and a hundred in memory, and while protobuf parses millions of them no
# other code of the process runs, in any thread.

_FIELDS_AT_ONCE = 10_000
"""A few milliseconds: others have their turn then."""
_PACKED_BYTES = 4
"""Packed numbers are cheap: this many bytes of them count as one field."""
_FIXED_BYTES = {1: 8, 3: 0, 4: 0, 5: 4}
"""The bytes after the tag, by wire type. The contents of a group are counted as if they stood beside it."""


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Fields of a message type that hold messages, and those that may hold packed numbers."""

    nested: Mapping[int, FieldLayout]
    packed: frozenset[int]


def layout_of(message: Descriptor) -> FieldLayout:
    """The type must not contain itself."""
    nested = {field.number: layout_of(field.message_type) for field in message.fields if field.message_type}
    return FieldLayout(nested, frozenset(field.number for field in message.fields if _is_packable(field)))


def _is_packable(field: FieldDescriptor) -> bool:
    of_bytes = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return field.is_repeated and not field.message_type and field.type not in of_bytes


async def require_few_fields(data: bytes, layout: FieldLayout, most: int) -> None:
    """Raises InvalidArgument for a message of too many fields, nested ones included.

    Bytes that are no message of this layout pass: the parser refuses them after no more fields than were counted.
    """
    if len(data) <= 2 * most:
        return
    for count in _counts(data, layout):
        require_at_most(count, most, "the request, with the messages in it,")
        await asyncio.sleep(0)


def _counts(data: bytes, layout: FieldLayout) -> Iterator[int]:
    """The fields so far, every few thousand of them and at the end."""
    count, pause = 0, _FIELDS_AT_ONCE
    inside = [(layout, 0, len(data))]
    """Messages to be read on: (layout, from where, to where)."""
    while inside:
        layout, at, end = inside.pop()
        with suppress(IndexError, ValueError):  # cut off, or a number without end
            while at < end:
                count += 1
                if count > pause:
                    yield count
                    pause = count + _FIELDS_AT_ONCE
                tag, at = (data[at], at + 1) if data[at] < 0x80 else read_varint(data, at)
                kind = tag & 7
                if kind == 0:
                    _, at = read_varint(data, at)
                elif kind != 2:
                    at += _FIXED_BYTES.get(kind, end)  # to the end where there is no such type
                else:
                    length, at = (data[at], at + 1) if data[at] < 0x80 else read_varint(data, at)
                    if tag >> 3 in layout.packed:
                        count += length // _PACKED_BYTES
                    elif length and tag >> 3 in layout.nested:
                        inside += (layout, at + length, end), (layout.nested[tag >> 3], at, min(at + length, end))
                        break
                    at += length
    yield count
