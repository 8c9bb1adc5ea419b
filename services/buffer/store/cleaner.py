"""Gives disk back: what is alive in a segment is written again at the end, and the segment is deleted.

Consumes segments that are no longer written to; unblocked by payloads that are deleted. A segment that is mostly alive
stays, a damaged one too. An error ends the ledger at the next commit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.rpc.log import log
from services.buffer.store import segment_rows as codec
from services.buffer.store.files import Buffer
from services.buffer.store.places import Place, Places
from services.buffer.store.segment_index import SegmentIndex
from services.buffer.store.segment_log import SegmentLog
from services.buffer.store.segment_record import HEADER_BYTES, Damage, Record, RecordType, scan

_WORTH_LIVE_FRACTION = 0.5
_SMALL_FRACTION = 1 / 16
_PORTION_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Carried:
    """A transaction's rows that are still alive, and the payloads that go with them."""

    rows: codec.Rows
    payloads: tuple[Buffer, ...]
    places: tuple[Place, ...]
    """Where the payloads lay."""

    @property
    def num_bytes(self) -> int:
        """On the disk, about."""
        return sum(map(len, self.payloads)) + len(codec.dump(self.rows))

    def without_dead(self, places: Places, forgotten: Set[str]) -> Carried:
        """The same without the payloads that are not in their places any more, and without forgotten groups."""
        old = iter(zip(self.payloads, self.places, strict=True))
        samples: list[codec.SampleRow] = []
        kept: list[tuple[Buffer, Place]] = []
        for row in self.rows.samples:
            if row.payload_bytes is not None:
                payload, place = next(old)
                if places.get(row.key) == place:
                    kept.append((payload, place))
                else:
                    row = codec.SampleRow(row.key, row.position, None, row.body)
            samples.append(row)
        groups = [row for row in self.rows.groups if row.group_id not in forgotten]
        prompts = [row for row in self.rows.prompts if row.group_id not in forgotten]
        rows = msgspec.structs.replace(self.rows, samples=samples, groups=groups, prompts=prompts)
        return Carried(rows, tuple(p for p, _ in kept), tuple(p for _, p in kept))


class Carrier(Protocol):
    """The store, as a cleaner sees it."""

    def flush_index(self) -> None:
        """Everything committed is in the index."""

    def carry(self, carried: Sequence[Carried]) -> None:
        """Durable at its new place; what died meanwhile is left out."""

    def delete(self, segment: int) -> None:
        """Everything in it is dead or elsewhere."""


class Cleaner:
    """One thread; `clean` may be called without it."""

    def __init__(
        self, carrier: Carrier, segment_log: SegmentLog, index: SegmentIndex, places: Places, segment_bytes: int
    ) -> None:
        self._carrier = carrier
        self._log = segment_log
        self._index = index
        self._places = places
        self._small_bytes = segment_bytes * _SMALL_FRACTION
        self._not_worth: dict[int, int] = {}
        """Live payload bytes at which a segment was found to be mostly alive."""
        self._oldest_position = index.oldest_position()
        self._cleaning = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="cleaner", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Payloads were deleted."""
        self._wake.set()

    def check(self) -> None:
        """Raises what stopped the thread."""
        if self._error:
            raise self._error

    def close(self) -> None:
        """Finishes the segment it is at."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def clean(self) -> int:
        """Segments deleted."""
        with self._cleaning:
            self._reconsider()
            return sum(self._clean(segment) for segment in self._candidates() if not self._closing)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait()
                self._wake.clear()
                self.clean()
        except Exception as error:  # handed to the writer, which ends the process
            self._error = error

    def _reconsider(self) -> None:
        """A segment that was kept for its part of the history may be worth it when that is deleted."""
        if self._not_worth and self._index.oldest_position() > self._oldest_position:
            self._oldest_position = self._index.oldest_position()
            needed = self._index.segments_with_events()
            self._not_worth = {segment: size for segment, size in self._not_worth.items() if segment in needed}

    def _candidates(self) -> list[int]:
        sealed = [segment for segment in self._log.segments if segment != self._log.active]
        return [segment for segment in sealed if self._may_be_worth(segment)]

    def _may_be_worth(self, segment: int) -> bool:
        live_bytes, num_bytes = self._places.live_bytes(segment), self._log.num_bytes(segment)
        if segment in self._not_worth and live_bytes >= self._not_worth[segment] / 2:
            return False
        return num_bytes < self._small_bytes or live_bytes < num_bytes * _WORTH_LIVE_FRACTION

    def _clean(self, segment: int) -> bool:
        self._carrier.flush_index()
        data = self._log.contents(segment)
        items = list(scan(data, self._log.salt(segment)))
        damaged = sum(isinstance(item, Damage) for item in items)
        records = (item for item in items if isinstance(item, Record) and item.type is RecordType.TRANSACTION)
        carried = [c for c in (self._alive(segment, record, data) for record in records) if c.rows != _NOTHING]
        too_much = sum(c.num_bytes for c in carried) > len(data) * _WORTH_LIVE_FRACTION
        if damaged or (too_much and len(data) >= self._small_bytes):
            self._not_worth[segment] = 0 if damaged else self._places.live_bytes(segment)
            return False
        for portion in _portions(carried):
            self._carrier.carry(portion)
        self._carrier.flush_index()
        self._carrier.delete(segment)
        log.info("segment_deleted", segment=segment, num_bytes=len(data), carried=sum(c.num_bytes for c in carried))
        return True

    def _alive(self, segment: int, record: Record, data: bytes) -> Carried:
        rows, oldest_position = codec.load_rows(record.body), self._index.oldest_position()
        group_ids = [row.group_id for row in rows.groups] + [row.group_id for row in rows.prompts]
        groups = self._index.positions("groups", group_ids)
        brought = set(self._index.positions("samples", [row.key for row in rows.samples]).values())
        kept: list[codec.SampleRow] = []
        payloads: list[Buffer] = []
        places: list[Place] = []
        offset = record.end
        for row in rows.samples:
            payload_bytes = row.payload_bytes
            if payload_bytes is not None:
                place, start = Place(segment, offset, payload_bytes), offset + HEADER_BYTES
                offset = start + payload_bytes
                if self._places.get(row.key) == place and row.position in brought:
                    payloads.append(memoryview(data)[start:offset])
                    places.append(place)
                else:
                    payload_bytes = None
            if row.position in brought:
                kept.append(codec.SampleRow(row.key, row.position, payload_bytes, row.body))
        return Carried(
            codec.Rows(
                streams=[],
                groups=[row for row in rows.groups if groups.get(row.group_id) == row.position],
                prompts=[row for row in rows.prompts if row.group_id in groups],
                samples=kept,
                events=[event for event in rows.events if event.position >= oldest_position],
                deleted=[],
                # Needed for as long as an older segment may tell of these groups.
                forgotten=rows.forgotten if segment > min(self._log.segments) else [],
            ),
            tuple(payloads),
            tuple(places),
        )


def _portions(carried: Sequence[Carried]) -> Iterator[list[Carried]]:
    """Writers wait for one portion at a time."""
    portion: list[Carried] = []
    for one in carried:
        portion.append(one)
        if sum(c.num_bytes for c in portion) >= _PORTION_BYTES:
            yield portion
            portion = []
    yield portion  # the last, empty or not, brings the streams


_NOTHING = codec.Rows([], [], [], [], [], [], [])
