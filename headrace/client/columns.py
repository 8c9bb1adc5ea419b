"""Moves large columns separately: they are taken out of a sample before a put and put back when it is fetched.

Callers that put or fetch samples through a client never see it. A sample comes back byte for byte as it was packed.
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


Upload = Callable[[LargeColumn], Awaitable[None]]


async def slim_put(put: pb.GroupPut, upload_column: Upload) -> pb.GroupPut:
    """Uploads the put's large columns and returns it without them; itself when it has none."""
    samples = [await _slim(sample, upload_column) for sample in put.samples]
    if all(slim is sample for slim, sample in zip(samples, put.samples, strict=True)):
        return put
    slim_one = pb.GroupPut(lease_id=put.lease_id, group_id=put.group_id, outcome=put.outcome, samples=samples)
    if put.HasField("failure"):
        slim_one.failure.CopyFrom(put.failure)
    return slim_one


async def slim_release(release: pb.LeaseRelease, upload_column: Upload) -> pb.LeaseRelease:
    """Uploads the release's large columns and returns it without them."""
    samples = [await _slim(sample, upload_column) for sample in release.partial_samples]
    return pb.LeaseRelease(lease_id=release.lease_id, partial_samples=samples, reason=release.reason)


async def _slim(sample: sample_pb2.Sample, upload_column: Upload) -> sample_pb2.Sample:
    slim, columns = taken_out(sample)
    for column in columns:
        await upload_column(column)
    return slim


def put_back(sample: sample_pb2.Sample, data: Mapping[bytes, bytes]) -> sample_pb2.Sample:
    """The sample as it was packed. Raises as `Sample.unpack`.

    `data` maps the SHA-256 of an out-of-line column to its bytes.
    """
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
    """Sends the column in pieces, from the offset that the buffer already has; returns when the column is durable."""
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
    """Resumes after a broken connection until `time.monotonic()` reaches `end`. Raises DataLoss for another SHA-256."""
    data = bytearray()

    async def receive_rest(left_seconds: float) -> None:
        while len(data) < column.num_bytes:
            request = pb.FetchColumnRequest(sha256=column.sha256, offset=len(data))
            async for piece in receive(request, left_seconds):
                data.extend(piece.data)

    await retry_until(end, receive_rest)
    if hashlib.sha256(data).digest() != column.sha256:
        raise DataLoss(f"column {column.name} does not match its SHA-256: its bytes were changed on disk")
    return bytes(data)
