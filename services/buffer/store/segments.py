"""The ledger's rows and payloads in append-only segments, its state in an index beside them.

commit: encoded → one write, one fdatasync (durable here) → places in memory → the index, later, by a thread of its own.
open: index up to its mark, the segments' rest replayed, a torn tail cut; a missing or damaged index is made again.
A segment whose payloads are mostly gone is written anew without them and deleted (see `cleaner`).
"""

from __future__ import annotations

import fcntl
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headrace.errors import ConfigError, DataLoss, NotFound
from headrace.rpc.log import log
from services.buffer.group import SampleRecord
from services.buffer.store import segment_rows as codec
from services.buffer.store.base import Snapshot
from services.buffer.store.copy import CopiedFile, copy_folder, delete_leftovers, files_of
from services.buffer.store.files import Buffer, DiskFiles, Files
from services.buffer.store.segment_index import Applied, Damaged, Mark, Place, SegmentIndex, State
from services.buffer.store.segment_indexer import Indexer
from services.buffer.store.segment_log import Location, SegmentLog
from services.buffer.store.segment_record import RecordType
from services.buffer.store.segment_replay import SegmentReading, read_segment, require_joint
from services.buffer.transaction import LedgerEvent, Transaction

SEGMENT_BYTES = 64 << 20


class SegmentStore:
    """`folder`/segments/ and `folder`/index.sqlite. Raises ConfigError when another process has it."""

    name = "segments"

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        open_files: Callable[[Path], Files] = DiskFiles,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is in use by another buffer: stop it, or choose another --data-dir") from error
        delete_leftovers(folder)
        self._index_path = folder / "index.sqlite"
        self._files = open_files(folder / "segments")
        self._log = SegmentLog(self._files, segment_bytes)
        self._writing = threading.Lock()
        self._ledger_id = secrets.token_hex(4)
        self._torn_bytes = 0
        self._num_damaged = 0
        self._position = 0
        self._index, self._state = self._open()
        self._places = self._state.places
        self._log.open_segment(self._ledger_id)
        self._indexer = Indexer(self._index)

    def load(self) -> Snapshot:
        state = self._state
        return Snapshot(
            self._ledger_id, state.streams, state.groups, state.position, state.quarantined, self._torn_bytes
        )

    def commit(self, transactions: Sequence[Transaction]) -> None:
        with self._writing:
            self._indexer.check()
            rows = [codec.to_rows(transaction) for transaction in transactions]
            applied = self._append(rows, [list(t.payloads.values()) for t in transactions])
            for transaction, written in zip(transactions, applied, strict=True):
                for key in transaction.deleted_payloads:
                    self._places.pop(key, None)
                self._remember(written)
            self._indexer.add(applied, [e for t in transactions for e in t.events], self._mark(self._log.end))

    def read_payloads(self, records: Sequence[SampleRecord]) -> list[bytes]:
        return [self._read_payload(record) for record in records]

    def _read_payload(self, record: SampleRecord) -> bytes:
        place = self._places.get(record.key)
        while place is not None:
            found = self._log.read(Location(place.segment, place.offset), place.payload_bytes)
            if found is not None:
                return bytes(found.body)
            moved = self._places.get(record.key)
            if moved == place:
                raise DataLoss(
                    f"the payload of sample {record.sample_id} in segment {place.segment} is damaged: "
                    "drop its group or rewind past it"
                )
            place = moved
        raise NotFound(
            f"the payload of sample {record.sample_id} is gone: its group was expired or committed meanwhile"
        )

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        recent = self._indexer.recent(from_position, count)
        if recent is not None:
            return recent
        events: list[LedgerEvent] = []
        for location, num_bytes in self._index.find_events(max(from_position, 1), count):
            record = self._log.read(location, num_bytes)
            if record is None:
                raise DataLoss(
                    f"the history after position {from_position + len(events)} is damaged in segment "
                    f"{location.segment}: watch from a later position"
                )
            rows = codec.load_rows(record.body)
            events += [codec.load_event(e.body) for e in rows.events if e.position >= from_position]
            if len(events) >= count:
                break
        return events[:count]

    @contextmanager
    def copy(self) -> Iterator[Sequence[CopiedFile]]:
        """Of the segments alone: an index is made from them."""
        source = self._index_path.parent / "segments"
        with copy_folder(self._index_path.parent) as folder:
            target = folder / source.name
            target.mkdir()
            with self._writing:
                active, end = f"{self._log.end.segment:08d}-", self._log.end.offset
                for path in source.iterdir():
                    (target / path.name).hardlink_to(path)
            files = files_of(folder)
            yield [replace(file, num_bytes=end) if file.path.name.startswith(active) else file for file in files]

    def close(self) -> None:
        with self._writing:
            self._log.append([(RecordType.END, codec.dump(codec.End(self._log.next_number, [])))])
            self._indexer.add([], [], self._mark(self._log.end))
        self._indexer.close()
        self._log.seal()
        self._index.close()
        self._files.close()
        self._lock_file.close()

    def _append(self, rows: Sequence[codec.Rows], payloads: Sequence[Sequence[Buffer]]) -> list[Applied]:
        first = number = self._log.next_number
        bodies: list[tuple[RecordType, Buffer]] = []
        touched: list[codec.Touched] = []
        for transaction, bytes_ in zip(rows, payloads, strict=True):
            bodies.append((RecordType.TRANSACTION, codec.dump(transaction)))
            bodies += [(RecordType.PAYLOAD, payload) for payload in bytes_]
            touched.append(codec.to_touched(number, transaction))
            number += 1 + len(bytes_)
        bodies.append((RecordType.END, codec.dump(codec.End(first, touched))))
        locations = self._log.append(bodies)
        at = 0
        applied = []
        for transaction, bytes_ in zip(rows, payloads, strict=True):
            following = at + 1 + len(bytes_)
            applied.append(Applied(transaction, locations[at], len(bodies[at][1]), locations[at + 1 : following]))
            at = following
        return applied

    def _remember(self, applied: Applied) -> None:
        with_payload = (row for row in applied.rows.samples if row.payload_bytes is not None)
        for row, location in zip(with_payload, applied.payloads, strict=True):
            self._places[row.key] = Place(*location, row.payload_bytes or 0)
        if applied.rows.events:
            self._position = applied.rows.events[-1].position

    def _mark(self, end: Location) -> Mark:
        return Mark(end, self._log.next_number, self._position, self._ledger_id)

    # Opening

    def _open(self) -> tuple[SegmentIndex, State]:
        try:
            self._index = SegmentIndex(self._index_path)
            self._replay(self._index.mark())
            return self._index, self._index.load()
        except Damaged as damage:
            log.warning("index_rebuilt", folder=str(self._index_path.parent), message=str(damage))
        self._index = self._new_index()
        self._replay(None)
        return self._index, self._index.load()

    def _new_index(self) -> SegmentIndex:
        for path in self._index_path.parent.glob("index.sqlite*"):
            path.unlink()
        return SegmentIndex(self._index_path)

    def _replay(self, mark: Mark | None) -> None:
        """Brings the index up to the end of the segments, and makes that end durable."""
        start = mark.location if mark else Location(0, 0)
        segments = [segment for segment in self._log.segments if segment >= start.segment]
        if mark and start.segment not in segments:
            raise Damaged(f"the index ends in segment {start.segment}, which is not there")
        if mark:
            self._position, self._ledger_id, self._log.next_number = mark.position, mark.ledger_id, mark.number
        lost: dict[str, int] = {}
        before: SegmentReading | None = None
        for segment in segments:
            reading = SegmentReading(segment, 0)
            if mark and segment == start.segment:
                reading = SegmentReading(segment, start.offset, mark.number, mark.number)
            self._read(reading, before, is_last=segment == segments[-1])
            for applied in reading.applied:
                for row in applied.rows.streams:
                    lost.pop(f"streams/{row.name}", None)
            lost.update(reading.lost)
            self._index.apply(reading.applied)
            before = reading
        self._index.apply([], self._cut(before) if before else None, list(lost.items()))

    def _read(self, reading: SegmentReading, before: SegmentReading | None, *, is_last: bool) -> None:
        data = self._log.contents(reading.segment)
        read_segment(data, reading, self._log.salt(reading.segment), is_last=is_last)
        if before and before.segment + 1 == reading.segment:
            require_joint(before, reading)
        self._position = max(self._position, reading.position)
        self._num_damaged += reading.num_damaged
        self._ledger_id = reading.ledger_id or self._ledger_id
        self._log.next_number = reading.next_number or self._log.next_number

    def _cut(self, reading: SegmentReading) -> Mark:
        """Takes the torn tail off the youngest segment."""
        self._torn_bytes = reading.torn_bytes
        self._log.cut(reading.segment, reading.end)
        return self._mark(Location(reading.segment, reading.end))
