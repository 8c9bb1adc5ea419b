"""Answers with samples as bytes: payloads and envelopes are neither parsed nor copied, an answer is one join."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.wire.protobuf import Payload, length_delimited, varint
from headrace.wire.put_request import parse_puts
from services.buffer.ledger.group import SampleRecord

_GROUP_PROMPT, _GROUP_SAMPLES = 3, 4  # of Group
_BATCH_GROUPS = 2  # of LeaseBatchResponse
_SAMPLE_TAG = b"\x0a"  # FetchSamplesResponse.samples
_ENVELOPE_TAG = b"\x0a"
_PAYLOAD_TAG = b"\x12"
_BATCH_SAMPLES_TAG = b"\x12"  # BatchGroup.samples


def sample_bytes(record: SampleRecord, payload: Payload) -> Iterable[Payload]:
    """One sample of a FetchSamplesResponse, to be joined."""
    envelope = record.envelope
    envelope_length, payload_length = varint(len(envelope)), varint(len(payload))
    length = 2 + len(envelope_length) + len(envelope) + len(payload_length) + len(payload)
    return _SAMPLE_TAG, varint(length), _ENVELOPE_TAG, envelope_length, envelope, _PAYLOAD_TAG, payload_length, payload


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
