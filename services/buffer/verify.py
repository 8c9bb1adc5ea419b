"""`python -m services.buffer.verify STORE FOLDER`: opens a ledger that nobody serves and reads all of it.

Prints one JSON line with what is there; ends with 1 when something is damaged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.config.job import BufferSection
from headrace.errors import DataLoss, HeadraceError
from headrace.rpc.log import configure_logging
from services.buffer.store.base import Store
from services.buffer.store.kinds import open_store


@dataclass(frozen=True, slots=True)
class Contents:
    """What a ledger holds."""

    streams: int
    groups: int
    events: int
    samples: int
    payload_bytes: int
    damaged: tuple[str, ...]


def verify(store: Store) -> Contents:
    """Reads every record and every payload against its checksum."""
    snapshot = store.load()
    records = [record for group in snapshot.groups for record in group.records]
    damaged = list(snapshot.quarantined)
    for record in records:
        try:
            store.read_payloads([record])
        except HeadraceError as error:
            damaged.append(f"{record.key}: {error.message}")
    return Contents(
        streams=len(snapshot.streams),
        groups=len(snapshot.groups),
        events=sum(_events(store, damaged)),
        samples=len(records),
        payload_bytes=sum(record.payload_bytes for record in records),
        damaged=tuple(damaged),
    )


def _events(store: Store, damaged: list[str]) -> Iterator[int]:
    position = 1
    while True:
        try:
            events = store.read_events(position, 1_000)
        except DataLoss as error:
            damaged.append(error.message)
            return
        if not events:
            return
        yield len(events)
        position = events[-1].position + 1


def main() -> int:
    """0: whole. 1: damaged, or it cannot be opened."""
    configure_logging("buffer")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    try:
        store = open_store(BufferSection.model_validate({"buffer_store": kind}), folder, "run")
        contents = verify(store)
        store.close()
    except (HeadraceError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(contents)))
    return 1 if contents.damaged else 0


if __name__ == "__main__":
    sys.exit(main())
