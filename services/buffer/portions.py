"""Samples of one answer, cut into messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.buffer.group import SampleRecord

_FETCH_BYTES = 3 << 20


def portions(records: Sequence[SampleRecord]) -> Iterator[list[SampleRecord]]:
    """Cuts where a message would grow beyond gRPC's usual 4 MiB; a larger record is alone."""
    portion: list[SampleRecord] = []
    num_bytes = 0
    for record in records:
        size = record.payload_bytes + len(record.envelope)
        if portion and num_bytes + size > _FETCH_BYTES:
            yield portion
            portion, num_bytes = [], 0
        portion.append(record)
        num_bytes += size
    if portion:
        yield portion
