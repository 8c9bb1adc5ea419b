"""Every payload is checked when it is read."""

from __future__ import annotations

from headrace.digest import matches
from headrace.errors import DataLoss, NotFound
from headrace.protobuf import Payload
from services.buffer.ledger.group import SampleRecord


def checked_payload(record: SampleRecord, payload: Payload | None) -> Payload:
    """Raises NotFound when the bytes are deleted, DataLoss when they are not those that were put."""
    if payload is None:
        raise NotFound(
            f"the payload of sample {record.sample_id} is gone: its group expired or was committed meanwhile"
        )
    if not matches(record.digest, payload):
        raise DataLoss(
            f"the payload of sample {record.sample_id} does not match the digest it was put with: "
            "the disk has changed it; drop its group or rewind past it"
        )
    return payload
