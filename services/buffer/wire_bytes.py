"""PutGroups requests and FetchSamples answers as bytes: payloads are neither parsed nor copied.

A generated message copies every payload twice on its way in and twice on its way out. Here a request is walked field by
field, payloads stay slices of it, and only the envelopes are parsed; an answer is one join.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.client.put_request import varint
from services.buffer.group import SampleRecord
from services.buffer.transaction import Payload

_VARINT, _BYTES = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_SAMPLES = 4
_SAMPLE_TAG = b"\x0a"  # FetchSamplesResponse.samples
_ENVELOPE_TAG = b"\x0a"
_PAYLOAD_TAG = b"\x12"


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample of a request."""

    envelope: bytes
    payload: Payload


@dataclass(frozen=True, slots=True)
class RawPut:
    """A GroupPut; `rest` is all of it but its samples."""

    rest: pb.GroupPut
    samples: tuple[RawSample, ...]


def parse_puts(data: bytes) -> list[RawPut]:
    """A PutGroupsRequest. Raises DecodeError as its generated class does."""
    try:
        return [_put(contents) for number, _, contents in _fields(memoryview(data)) if number == 1]
    except (IndexError, ValueError):  # not protobuf, or not as every encoder writes it
        return [raw_put(put) for put in pb.PutGroupsRequest.FromString(data).groups]


def raw_put(message: pb.GroupPut) -> RawPut:
    """From a message that was parsed."""
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


def add_to_server(servicer: Any, server: Any) -> None:
    """The generated registration, with these two methods in the place of its own."""
    handlers = {
        "PutGroups": grpc.unary_unary_rpc_method_handler(
            servicer.PutGroups, parse_puts, pb.PutGroupsResponse.SerializeToString
        ),
        "FetchSamples": grpc.unary_stream_rpc_method_handler(
            servicer.FetchSamples, pb.FetchSamplesRequest.FromString, bytes
        ),
    }
    name = pb.DESCRIPTOR.services_by_name["BufferService"].full_name
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # generated
    server.add_registered_method_handlers(name, handlers)


def _put(data: memoryview) -> RawPut:
    samples: list[RawSample] = []
    rest: list[memoryview] = []
    for number, whole, contents in _fields(data):
        if number == _SAMPLES:
            samples.append(_sample(contents))
        else:
            rest.append(whole)
    return RawPut(pb.GroupPut.FromString(b"".join(rest)), tuple(samples))


def _sample(data: memoryview) -> RawSample:
    parts: dict[int, memoryview] = {}
    for number, _, contents in _fields(data):
        if number in parts:
            raise ValueError(f"field {number} comes twice: the generated class knows how to merge them")
        parts[number] = contents
    return RawSample(bytes(parts.get(1, b"")), parts.get(2, b""))


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """(number, the field with its tag, its contents)."""
    at, end = 0, len(data)
    while at < end:
        start = at
        tag, at = _read_varint(data, at)
        kind = tag & 7
        contents = at
        if kind == _BYTES:
            length, contents = _read_varint(data, at)
            at = contents + length
        elif kind == _VARINT:
            _, at = _read_varint(data, at)
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            raise ValueError(f"wire type {kind}")
        if at > end:
            raise ValueError("cut off")
        yield tag >> 3, data[start:at], data[contents:at]


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
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
