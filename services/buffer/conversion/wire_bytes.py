"""PutGroups requests, and answers with samples, as bytes: payloads and envelopes are neither parsed nor copied.

A generated message copies every payload twice on its way in and twice on its way out. Here a request is walked field by
field, payloads stay slices of it, and only the envelopes are parsed; an answer is one join.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.wire.checks import require_at_most, require_bytes
from headrace.wire.limits import (
    MAX_ENVELOPE_BYTES,
    MAX_GROUP_ENVELOPE_BYTES,
    MAX_PUT_SAMPLES_PER_CALL,
    MAX_PUTS_PER_CALL,
)
from headrace.wire.put_request import varint
from services.buffer.ledger.group import SampleRecord
from services.buffer.ledger.transaction import Payload

_PARSED_BYTES = 256 << 10
"""A larger request is read field by field and never parsed as a whole: many small parts cost memory and time."""
_REST_BYTES = 4 << 20
"""All puts of a request without their samples: two ids and a failure each."""
_MOST_FIELDS = 64
"""Fields of a put without its samples, and of a sample, unknown fields included."""
_GROUPS = 1  # of PutGroupsRequest
_SAMPLES = 4  # of GroupPut
_ENVELOPE, _PAYLOAD = 1, 2  # of Sample
_GROUP_PROMPT, _GROUP_SAMPLES = 3, 4  # of Group
_BATCH_GROUPS = 2  # of LeaseBatchResponse
_SAMPLE_TAG = b"\x0a"  # FetchSamplesResponse.samples
_ENVELOPE_TAG = b"\x0a"
_PAYLOAD_TAG = b"\x12"
_BATCH_SAMPLES_TAG = b"\x12"  # BatchGroup.samples


class RawSample(msgspec.Struct, frozen=True, gc=False):
    """A sample of a request, not parsed yet."""

    envelope: bytes
    payload: Payload


class RawPut(msgspec.Struct, frozen=True, gc=False):
    """A GroupPut; `rest` is all of it but its samples."""

    rest: pb.GroupPut
    samples: tuple[RawSample, ...]


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
    for count, (number, _, start, end) in enumerate(fields(data, 0, len(data)), 1):
        require_at_most(count, MAX_PUTS_PER_CALL, "groups")
        if number == _GROUPS:
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


def sample_bytes(record: SampleRecord, payload: Payload) -> Iterable[Payload]:
    """One sample of a FetchSamplesResponse, to be joined."""
    envelope = record.envelope
    envelope_length, payload_length = varint(len(envelope)), varint(len(payload))
    length = 2 + len(envelope_length) + len(envelope) + len(payload_length) + len(payload)
    return _SAMPLE_TAG, varint(length), _ENVELOPE_TAG, envelope_length, envelope, _PAYLOAD_TAG, payload_length, payload


def length_delimited(number: int, data: bytes) -> bytes:
    """A field of bytes, a string or a message, as it stands in a message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def group_bytes(group: pb.Group, prompt: bytes, envelopes: Iterable[bytes]) -> bytes:
    """A Group of a ListGroupsResponse whose prompt and envelopes are bytes already."""
    samples = b"".join([length_delimited(_GROUP_SAMPLES, envelope) for envelope in envelopes])
    return length_delimited(1, group.SerializeToString() + length_delimited(_GROUP_PROMPT, prompt) + samples)


def batch_group_bytes(group_id: str, envelopes: Iterable[bytes]) -> bytes:
    """A BatchGroup of a LeaseBatchResponse."""
    parts = [part for envelope in envelopes for part in (_BATCH_SAMPLES_TAG, varint(len(envelope)), envelope)]
    return length_delimited(_BATCH_GROUPS, length_delimited(1, group_id.encode()) + b"".join(parts))


def add_to_server(servicer: Any, server: Any) -> None:
    """Registers the servicer with these parsers and serializers in place of the generated ones."""
    handlers = {
        "PutGroups": grpc.unary_unary_rpc_method_handler(
            servicer.PutGroups, parse_puts, pb.PutGroupsResponse.SerializeToString
        ),
        "FetchSamples": grpc.unary_stream_rpc_method_handler(
            servicer.FetchSamples, pb.FetchSamplesRequest.FromString, bytes
        ),
        "LeaseBatch": grpc.unary_unary_rpc_method_handler(servicer.LeaseBatch, pb.LeaseBatchRequest.FromString, bytes),
        "ListGroups": grpc.unary_unary_rpc_method_handler(servicer.ListGroups, pb.ListGroupsRequest.FromString, bytes),
    }
    name = pb.DESCRIPTOR.services_by_name["BufferService"].full_name
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(servicer, server)
    server.add_registered_method_handlers(name, handlers)


def _put(data: bytes, start: int, end: int, most_samples: int, most_bytes: int) -> tuple[RawPut, int]:
    """Returns the put, and how many bytes it has besides its samples (at most `most_bytes`)."""
    samples: list[RawSample] = []
    rest: list[bytes] = []
    num_bytes = 0
    view = memoryview(data)
    for number, field, contents, stop in fields(data, start, end):
        if number == _SAMPLES:
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
    if start < end and data[start] == _ENVELOPE_TAG[0]:
        length, envelope_at = read_varint(data, start + 1)
        envelope_end = envelope_at + length
        if envelope_end < end and data[envelope_end] == _PAYLOAD_TAG[0]:
            length, payload_at = read_varint(data, envelope_end + 1)
            if payload_at + length == end:
                require_bytes(envelope_end - envelope_at, MAX_ENVELOPE_BYTES, "groups.samples.envelope")
                return RawSample(data[envelope_at:envelope_end], view[payload_at:end])
    return _sample_of_fields(data, view, start, end)


def _sample_of_fields(data: bytes, view: memoryview, start: int, end: int) -> RawSample:
    envelope: bytes | None = None
    payload: Payload | None = None
    for count, (number, _, contents, stop) in enumerate(fields(data, start, end)):
        require_at_most(count, _MOST_FIELDS, "groups.samples")
        if number == _ENVELOPE and envelope is None:
            require_bytes(stop - contents, MAX_ENVELOPE_BYTES, "groups.samples.envelope")
            envelope = data[contents:stop]
        elif number == _PAYLOAD and payload is None:
            payload = view[contents:stop]
        elif number in (_ENVELOPE, _PAYLOAD):
            raise ValueError(f"field {number} comes twice: the generated class knows how to merge them")
    return RawSample(envelope or b"", b"" if payload is None else payload)


def fields(data: Payload, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, where the field starts, where its contents do, where both end)."""
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
        yield tag >> 3, start, contents, at


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
