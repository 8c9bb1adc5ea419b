"""The ledger's rows and payloads in append-only segments, its state in an index beside them.

commit: encoded → one write, one fdatasync (durable here) → places in memory → the index, later, by a thread of its own.
open: the index up to its mark, the rest of the segments replayed, a torn tail cut (`segment_opening`).
Segments whose payloads are mostly gone are written anew without them and deleted (`cleaner`).
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headrace.errors import ConfigError, DataLoss, NotFound
from services.buffer.group import SampleRecord
from services.buffer.store import segment_rows as codec
from services.buffer.store.base import Snapshot
from services.buffer.store.cleaner import Carried, Cleaner
from services.buffer.store.copy import CopiedFile, copy_folder, delete_leftovers, files_of
from services.buffer.store.files import Buffer, DiskFiles, Files
from services.buffer.store.index_rows import Applied
from services.buffer.store.index_state import State
from services.buffer.store.places import Place, Places
from services.buffer.store.segment_index import Mark, SegmentIndex
from services.buffer.store.segment_indexer import Indexer
from services.buffer.store.segment_log import Location, SegmentLog
from services.buffer.store.segment_opening import open_index, rebuild_index
from services.buffer.store.segment_record import RecordType
from services.buffer.transaction import LedgerEvent, Payload, Transaction

SEGMENT_BYTES = 64 << 20


class SegmentStore:
    """`folder`/segments/ and `folder`/index.sqlite. Raises ConfigError when another process has it."""

    name = "segments"

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        keep_index: bool = True,
        open_files: Callable[[Path], Files] = DiskFiles,
        index_at: Callable[[Path], SegmentIndex] = SegmentIndex,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is in use by another buffer: stop it, or choose another --data-dir") from error
        delete_leftovers(folder)
        self._folder = folder
        self._files = open_files(folder / "segments")
        self._log = SegmentLog(self._files, segment_bytes)
        open_it = open_index if keep_index else rebuild_index
        opened = open_it(folder / "index.sqlite", self._log, index_at)
        self._index, self._ledger_id = opened.index, opened.ledger_id
        self._torn_bytes, self._num_damaged = opened.torn_bytes, opened.num_damaged
        self._first_state: State | None = opened.state
        """Until it is asked for, or changes."""
        self._position = opened.state.position
        self._oldest_position = opened.state.oldest_position
        self._places = Places(opened.state.places)
        self._forgotten: set[str] = set()
        """Groups forgotten since the index was flushed."""
        self._streams = codec.to_stream_rows(opened.state.streams)
        self._writing = threading.Lock()
        self._log.open_segment(self._ledger_id)
        self._indexer = Indexer(self._index)
        self._cleaner = Cleaner(self, self._log, self._index, self._places, segment_bytes)

    def load(self) -> Snapshot:
        with self._writing:
            state, self._first_state = self._first_state, None
            if state is None:
                self._indexer.flush()
                state = self._index.load()
        return Snapshot(
            self._ledger_id,
            state.streams,
            state.groups,
            state.position,
            state.oldest_position,
            state.quarantined,
            self._torn_bytes,
            self._num_damaged,
        )

    def commit(self, transactions: Sequence[Transaction]) -> None:
        self._indexer.check()
        self._cleaner.check()
        with self._writing:
            self._first_state = None
            rows = [codec.to_rows(transaction) for transaction in transactions]
            applied = self._append(rows, [list(t.payloads.values()) for t in transactions])
            for transaction, written in zip(transactions, applied, strict=True):
                for key in transaction.deleted_payloads:
                    self._places.drop(key)
                self._forgotten.update(written.rows.forgotten)
                self._remember(written)
            self._indexer.add(applied, [e for t in transactions for e in t.events], self._mark())
        if any(t.deleted_payloads or t.events_from for t in transactions):
            self._cleaner.wake()

    def read_payloads(self, records: Sequence[SampleRecord]) -> Sequence[Payload]:
        return [self._read_payload(record) for record in records]

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        events: list[LedgerEvent] = []
        position = max(from_position, self._oldest_position)
        while len(events) < count:
            recent = self._indexer.recent(position, count - len(events))
            found = self._indexed_events(position, count - len(events)) if recent is None else recent
            if not found:
                break
            events += found
            position = events[-1].position + 1
        return events

    @contextmanager
    def copy(self) -> Iterator[Sequence[CopiedFile]]:
        """Of the segments alone: an index is made from them."""
        source = self._folder / "segments"
        with copy_folder(self._folder) as folder:
            target = folder / source.name
            target.mkdir()
            with self._writing:
                active, end = f"{self._log.end.segment:08d}-", self._log.end.offset
                for path in source.iterdir():
                    (target / path.name).hardlink_to(path)
            files = files_of(folder)
            yield [replace(file, num_bytes=end) if file.path.name.startswith(active) else file for file in files]

    def free_bytes(self) -> int | None:
        return self._files.free_bytes()

    def close(self) -> None:
        self._cleaner.close()
        with self._writing:
            # Nothing but an END: what is damaged before it was once whole.
            self._log.append([(RecordType.END, codec.dump(codec.End(self._log.next_number, [], [])))])
            self._indexer.add([], [], self._mark())
        self._indexer.close()
        self._log.seal()
        self._index.close()
        self._files.close()
        self._lock_file.close()

    # For the cleaner

    def flush_index(self) -> None:
        """Everything committed is in the index."""
        with self._writing:
            self._forgotten.clear()
        self._indexer.flush()

    def carry(self, carried: Sequence[Carried]) -> None:
        """Durable at its new place; what died meanwhile is left out."""
        with self._writing:
            streams = codec.Rows(list(self._streams.values()), [], [], [], [], [], [], self._oldest_position)
            alive = [c.without_dead(self._places, self._forgotten) for c in carried]
            applied = self._append([streams, *(c.rows for c in alive)], [(), *(c.payloads for c in alive)])
            for written in applied:
                self._remember(written)
            self._indexer.add(applied, [], self._mark())

    def delete(self, segment: int) -> None:
        """Everything in it is dead or elsewhere."""
        self._index.sync()  # what only this segment could tell an older index is in it for good
        with self._writing:
            self._log.delete(segment)

    def clean(self) -> int:
        """Segments deleted, at once instead of in the background."""
        return self._cleaner.clean()

    # Inside

    def _read_payload(self, record: SampleRecord) -> Payload:
        place = self._places.get(record.key)
        while place is not None:
            body = self._log.read(Location(place.segment, place.offset), place.payload_bytes)
            if body is not None:
                return body
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

    def _indexed_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        events: list[LedgerEvent] = []
        for location, num_bytes in self._index.find_events(from_position, count):
            body = self._log.read(location, num_bytes)
            following = events[-1].position + 1 if events else from_position
            if body is None and location.segment not in self._log.segments:  # cleaned meanwhile: it is elsewhere now
                return events + self._indexed_events(following, count - len(events))
            if body is None:
                raise DataLoss(
                    f"the history after position {following} is damaged in segment {location.segment}: "
                    "watch from a later position"
                )
            events += [codec.load_event(e.body) for e in codec.load_rows(body).events if e.position >= from_position]
            if len(events) >= count:
                break
        return events[:count]

    def _append(self, rows: Sequence[codec.Rows], payloads: Sequence[Sequence[Buffer]]) -> list[Applied]:
        first = number = self._log.next_number
        bodies: list[tuple[RecordType, Buffer]] = []
        touched: list[codec.Touched] = []
        for transaction, parts in zip(rows, payloads, strict=True):
            bodies.append((RecordType.TRANSACTION, codec.dump(transaction)))
            bodies += [(RecordType.PAYLOAD, payload) for payload in parts]
            touched.append(codec.to_touched(number, transaction))
            number += 1 + len(parts)
        streams = {row.name: row for transaction in rows for row in transaction.streams}
        bodies.append((RecordType.END, codec.dump(codec.End(first, touched, list(streams.values())))))
        locations = self._log.append(bodies)
        applied: list[Applied] = []
        at = 0
        for transaction, parts in zip(rows, payloads, strict=True):
            following = at + 1 + len(parts)
            applied.append(Applied(transaction, locations[at], len(bodies[at][1]), locations[at + 1 : following]))
            at = following
        return applied

    def _remember(self, applied: Applied) -> None:
        with_payload = (row for row in applied.rows.samples if row.payload_bytes is not None)
        for row, location in zip(with_payload, applied.payloads, strict=True):
            self._places.set(row.key, Place(*location, row.payload_bytes or 0))
        self._streams.update((row.name, row) for row in applied.rows.streams)
        if applied.rows.events:
            self._position = max(self._position, applied.rows.events[-1].position)
        self._oldest_position = max(self._oldest_position, applied.rows.events_from or 0)

    def _mark(self) -> Mark:
        return Mark(self._log.end, self._log.next_number, self._position, self._ledger_id)
