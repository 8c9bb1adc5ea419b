"""Opens the index beside the segments and brings it up to their end; makes it again where it is missing or damaged."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.rpc.log import log
from services.buffer.store.index_rows import Damaged
from services.buffer.store.index_state import State
from services.buffer.store.segment_index import Mark, SegmentIndex
from services.buffer.store.segment_log import Location, SegmentLog
from services.buffer.store.segment_replay import SegmentReading, read_segment, require_joint

IndexAt = Callable[[Path], SegmentIndex]


@dataclass(frozen=True, slots=True)
class Opened:
    """What a store goes on from."""

    index: SegmentIndex
    state: State
    ledger_id: str
    torn_bytes: int
    num_damaged: int
    """Damaged stretches of segments that were read; older ones are found when they are."""


def open_index(path: Path, segment_log: SegmentLog, index_at: IndexAt = SegmentIndex) -> Opened:
    """Raises DataLoss when the segments have lost something that nobody can name."""
    try:
        return _open(path, segment_log, index_at)
    except Damaged as damage:
        log.warning("index_rebuilt", path=str(path), message=str(damage))
    return rebuild_index(path, segment_log, index_at)


def rebuild_index(path: Path, segment_log: SegmentLog, index_at: IndexAt = SegmentIndex) -> Opened:
    """From the segments alone."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    return _open(path, segment_log, index_at)


def _open(path: Path, segment_log: SegmentLog, index_at: IndexAt) -> Opened:
    index = index_at(path)
    try:
        replay = _Replay(index, segment_log)
        replay.run()
        return Opened(index, index.load(), replay.ledger_id, replay.torn_bytes, replay.num_damaged)
    except Damaged:
        index.close()
        raise


class _Replay:
    """From the index's mark to the end, segment by segment."""

    def __init__(self, index: SegmentIndex, segment_log: SegmentLog) -> None:
        mark = index.mark()
        self.torn_bytes = 0
        self.num_damaged = 0
        self.ledger_id = mark.ledger_id if mark else secrets.token_hex(4)
        self._index = index
        self._log = segment_log
        self._start = mark.location if mark else Location(0, 0)
        self._position = mark.position if mark else 0
        self._log.next_number = mark.number if mark else 1
        self._lost: dict[str, int] = {}
        self._segments = [segment for segment in segment_log.segments if segment >= self._start.segment]
        if mark and mark.location.segment not in self._segments:
            raise Damaged(f"the index ends in segment {mark.location.segment}, which is not there")

    def run(self) -> None:
        """Ends with everything durable: the torn tail is cut off the youngest segment."""
        before: SegmentReading | None = None
        for segment in self._segments:
            reading = self._read(segment)
            if before and before.segment + 1 == segment:
                require_joint(before, reading)
            self._index.apply(reading.applied)
            self._lost.update(reading.lost)
            before = reading
        if before:
            self.torn_bytes = before.torn_bytes
            self._log.cut(before.segment, before.end)
            mark = Mark(Location(before.segment, before.end), self._log.next_number, self._position, self.ledger_id)
            self._index.apply([], mark, list(self._lost.items()))

    def _read(self, segment: int) -> SegmentReading:
        reading = SegmentReading(segment, 0)
        if segment == self._start.segment and self._start.offset:
            size = self._log.num_bytes(segment)
            reading = SegmentReading(segment, min(self._start.offset, size), self._log.next_number)
            self.num_damaged += self._start.offset > size  # its end is gone; the index knows what was there
        data = self._log.contents(segment, reading.end)
        read_segment(data, reading, self._log.salt(segment), is_last=segment == self._segments[-1])
        self._position = max(self._position, reading.position)
        self.num_damaged += reading.num_damaged
        self.ledger_id = reading.ledger_id or self.ledger_id
        self._log.next_number = reading.next_number or self._log.next_number
        return reading
