"""Reads a segment back: whole batches in order, a torn one at the very end cut, damage before it named.

A batch ends with an END record and is written only after the one before it was synced. So what is not whole and has a
whole batch (or a younger segment) behind it was damaged later, and what has nothing behind it was never answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.errors import DataLoss
from services.buffer.store import segment_rows as codec
from services.buffer.store.index_rows import Applied
from services.buffer.store.segment_log import Location
from services.buffer.store.segment_record import HEADER_BYTES, Damage, Record, RecordType, scan


@dataclass(slots=True)
class SegmentReading:
    """What the batches of a segment changed, and where the last of them ends."""

    segment: int
    end: int
    next_number: int | None = None
    """Of the record that follows; None before the first."""
    first_number: int | None = None
    applied: list[Applied] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    """Rows and payloads in damaged records, by name, with their position."""
    num_batches: int = 0
    num_damaged: int = 0
    """Damaged stretches."""
    torn_bytes: int = 0
    position: int = 0
    ledger_id: str | None = None


@dataclass(slots=True)
class _Batch:
    records: dict[int, Record]
    end: Record | None
    first_number: int
    following_number: int | None
    """Of the record behind its END; None where nothing follows."""
    end_offset: int

    @property
    def is_whole(self) -> bool:
        return self.end is not None and len(self.records) == self.end.number - self.first_number


def read_segment(data: bytes, reading: SegmentReading, salt: int, *, is_last: bool) -> None:
    """From `reading.end` on, where `data` begins.

    Raises DataLoss when records are lost and nobody can say what they changed.
    """
    held: _Batch | None = None
    start = reading.end
    for batch in _batches(scan(data, salt, start), reading):
        if held:
            _apply(reading, held)
        held = batch
    if held and is_last and not held.is_whole:
        reading.torn_bytes = start + len(data.rstrip(b"\0")) - reading.end
        reading.num_damaged = max(reading.num_damaged - 1, 0)
    elif held:
        _apply(reading, held)


def require_joint(reading: SegmentReading, following: SegmentReading) -> None:
    """Two neighbours: raises DataLoss when records between them are gone without a trace."""
    if reading.next_number is not None and following.first_number not in (None, reading.next_number):
        raise DataLoss(
            f"the records {reading.next_number} to {following.first_number} of segment {reading.segment} are gone: "
            "restore a backup"
        )


def _batches(items: Iterator[Record | Damage], reading: SegmentReading) -> Iterator[_Batch]:
    records: dict[int, Record] = {}
    expected = reading.next_number
    is_damaged = False
    for item in items:
        if isinstance(item, Damage):
            is_damaged = True
            reading.num_damaged += 1
            continue
        if reading.first_number is None:
            reading.first_number = item.number
        expected = reading.first_number if expected is None else expected
        if item.type is RecordType.OPENED:
            reading.ledger_id = bytes(item.body).decode()
            reading.next_number, reading.end = item.number, item.end
        elif item.type is RecordType.END:
            first = codec.load_end(item.body).first_number
            if first > expected:  # the END before this batch is damaged, and perhaps more
                orphans = {n: r for n, r in records.items() if n < first}
                yield _Batch(orphans, None, expected, first, item.offset)
            own = {n: r for n, r in records.items() if n >= first}
            yield _Batch(own, item, first, item.number + 1, item.end)
            records, is_damaged, expected = {}, False, item.number + 1
        else:
            records[item.number] = item
    if records or is_damaged:
        last = max((record.end for record in records.values()), default=reading.end)
        yield _Batch(records, None, expected or 1, None, last)


def _apply(reading: SegmentReading, batch: _Batch) -> None:
    known: set[int] = set()
    for number, record in batch.records.items():
        if record.type is RecordType.TRANSACTION:
            known |= _apply_transaction(reading, batch, number, record)
    if batch.end is None:
        known_end = _require_all(reading, batch, known)
        reading.next_number = batch.following_number or known_end
    else:
        reading.next_number = batch.following_number
        _lose(reading, batch, codec.load_end(batch.end.body))
    reading.num_batches += 1
    reading.end = batch.end_offset


def _lose(reading: SegmentReading, batch: _Batch, end: codec.End) -> None:
    lost = [touched for touched in end.touched if touched.number not in batch.records]
    for transaction in lost:
        reading.lost.update((f"groups/{group_id}", position) for group_id, position in transaction.groups)
        reading.lost.update((f"prompts/{group_id}", 0) for group_id in transaction.prompts)
        reading.lost.update((f"samples/{key}", 0) for key in transaction.samples)
        reading.position = max(reading.position, transaction.position or 0)
    if lost:
        streams = codec.Rows(end.streams, [], [], [], [], [], [])
        reading.applied.append(Applied(streams, Location(reading.segment, batch.end_offset), 0, []))


def _apply_transaction(reading: SegmentReading, batch: _Batch, number: int, record: Record) -> set[int]:
    """The numbers of its records."""
    rows = codec.load_rows(record.body)
    offset, payloads = record.end, list[Location]()
    following = number
    for sample in rows.samples:
        if sample.payload_bytes is None:
            continue
        following += 1
        payloads.append(Location(reading.segment, offset))
        offset += HEADER_BYTES + sample.payload_bytes
        if following not in batch.records:
            reading.lost[f"payloads/{sample.key}"] = sample.position
    reading.applied.append(Applied(rows, Location(reading.segment, record.offset), len(record.body), payloads))
    if rows.events:
        reading.position = max(reading.position, rows.events[-1].position)
    return set(range(number, following + 1))


def _require_all(reading: SegmentReading, batch: _Batch, known: set[int]) -> int:
    """Without the END of a batch, its transactions must account for every number before it; the number behind it."""
    after = max(known | batch.records.keys(), default=batch.first_number - 1) + 2
    if batch.following_number:
        after = batch.following_number
    missing = set(range(batch.first_number, after - 1)) - known
    if missing:
        raise DataLoss(
            f"segment {reading.segment} is damaged around record {min(missing)}, and the list of what that changed is "
            "damaged as well: restore a backup"
        )
    return after
