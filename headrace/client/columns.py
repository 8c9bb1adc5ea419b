"""Large columns travel by themselves: taken out of a sample before it is put, put back in when it is fetched.

Whoever puts or fetches samples through a client never sees it. The sample comes back byte for byte as it was packed.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.digest import digest_of
from headrace.errors import DataLoss
from headrace.rpc.retry import retry_until
from headrace.trajectory import check_payload, parsed_payload

LARGE_COLUMN_BYTES = 1 << 20
_PIECE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class LargeColumn:
    """The bytes of a column, by their SHA-256."""

    sha256: bytes
    data: bytes


def taken_out(sample: sample_pb2.Sample) -> tuple[sample_pb2.Sample, Sequence[LargeColumn]]:
    """The sample without its large columns, and these; the sample itself when it has none."""
    if sample.envelope.payload_bytes < LARGE_COLUMN_BYTES:
        return sample, ()
    payload = sample_pb2.SamplePayload.FromString(sample.payload)
    envelope = sample_pb2.SampleEnvelope()
    envelope.CopyFrom(sample.envelope)
    large: list[LargeColumn] = []
    for column in payload.columns:
        if len(column.data) >= LARGE_COLUMN_BYTES:
            large.append(LargeColumn(hashlib.sha256(column.data).digest(), column.data))
            envelope.out_of_line.add(name=column.name, sha256=large[-1].sha256, num_bytes=len(column.data))
            column.ClearField("data")
    return (_sealed(envelope, payload), large) if large else (sample, ())


def put_back(sample: sample_pb2.Sample, data: Mapping[bytes, bytes]) -> sample_pb2.Sample:
    """The sample as it was packed; `data` has the bytes of its out-of-line columns. Raises as `Sample.unpack` does."""
    envelope = sample.envelope
    check_payload(envelope.sample_id, envelope.digest, envelope.payload_bytes, sample.payload)
    payload = parsed_payload(envelope.sample_id, sample.payload)
    sha256_of = {column.name: column.sha256 for column in sample.envelope.out_of_line}
    for column in payload.columns:
        if column.name in sha256_of:
            column.data = data[sha256_of[column.name]]
    envelope = sample_pb2.SampleEnvelope()
    envelope.CopyFrom(sample.envelope)
    envelope.ClearField("out_of_line")
    return _sealed(envelope, payload)


def _sealed(envelope: sample_pb2.SampleEnvelope, payload: sample_pb2.SamplePayload) -> sample_pb2.Sample:
    data = payload.SerializeToString(deterministic=True)
    envelope.digest, envelope.payload_bytes = digest_of(data), len(data)
    return sample_pb2.Sample(envelope=envelope, payload=data)


async def upload(
    send: Callable[[pb.UploadColumnRequest], Awaitable[pb.UploadColumnResponse]], large: LargeColumn
) -> None:
    """Piece by piece from where the buffer has it; it is durable when this returns."""
    view, offset, data = memoryview(large.data), 0, b""
    while True:
        request = pb.UploadColumnRequest(sha256=large.sha256, num_bytes=len(view), offset=offset, data=data)
        answer = await send(request)
        if answer.complete:
            return
        offset = answer.next_offset
        data = bytes(view[offset : offset + _PIECE_BYTES])


async def download(
    receive: Callable[[pb.FetchColumnRequest, float], AsyncIterator[pb.FetchColumnResponse]],
    column: sample_pb2.OutOfLineColumn,
    end: float,
) -> bytes:
    """Continues where a connection broke, until `time.monotonic()` reaches `end`. Raises DataLoss for other bytes."""
    data = bytearray()

    async def receive_rest(left_seconds: float) -> None:
        while len(data) < column.num_bytes:
            request = pb.FetchColumnRequest(sha256=column.sha256, offset=len(data))
            async for piece in receive(request, left_seconds):
                data.extend(piece.data)

    await retry_until(end, receive_rest)
    if hashlib.sha256(data).digest() != column.sha256:
        raise DataLoss(f"column {column.name} came with other bytes than its SHA-256 says: the disk has changed it")
    return bytes(data)
