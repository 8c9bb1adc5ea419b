"""`python -m services.buffer.verify STORE FOLDER` opens a ledger that nobody serves and reads all of it.

It prints one JSON line with the contents, and exits with 1 when something is damaged.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import DataLoss, HeadraceError
from headrace.job.schema.services import BufferSection
from headrace.rpc.log import configure_logging
from services.buffer.build import open_store
from services.buffer.ledger.group import SampleRecord
from services.buffer.store.base import Damage, Store


@dataclass(frozen=True, slots=True)
class Contents:
    """Counts what a ledger holds and names what is damaged."""

    streams: int
    groups: int
    events: int
    samples: int
    payload_bytes: int
    damaged: tuple[str, ...]


def verify(store: Store, columns: Path) -> Contents:
    """Reads every record, every payload and every column against its checksum."""
    snapshot = store.load()
    records = [record for group in snapshot.groups for record in group.records]
    unread: dict[str, str] = {}
    for record in records:
        try:
            store.read_payloads([record])
        except HeadraceError as error:
            unread[record.sample_id] = error.message
    named = {damage.sample_id for damage in store.damage()}
    damaged = [_described(damage) for damage in store.damage()]
    damaged += [f"sample {sample_id}: {message}" for sample_id, message in unread.items() if sample_id not in named]
    damaged += _damaged_columns(records, columns)
    return Contents(
        streams=len(snapshot.streams),
        groups=len(snapshot.groups),
        events=sum(_events(store, damaged)),
        samples=len(records),
        payload_bytes=sum(record.payload_bytes for record in records),
        damaged=tuple(damaged),
    )


def _described(damage: Damage) -> str:
    whose = [f"{kind} {name}" for kind, name in (("group", damage.group_id), ("sample", damage.sample_id)) if name]
    return f"{damage.what} ({', '.join(whose)})" if whose else damage.what


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
        if events[0].position != position > 1:
            damaged.append(f"events {position} to {events[0].position - 1} of the history are missing")
        yield len(events)
        position = events[-1].position + 1


def _damaged_columns(records: Sequence[SampleRecord], folder: Path) -> Iterator[str]:
    envelopes = (sample_pb2.SampleEnvelope.FromString(record.envelope) for record in records)
    named = {column.sha256: envelope.sample_id for envelope in envelopes for column in envelope.out_of_line}
    for sha256, sample_id in named.items():
        path = folder / sha256.hex()
        if not path.is_file():
            yield f"columns/{path.name} of sample {sample_id} is missing"
            continue
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").digest() != sha256:
                yield f"columns/{path.name} of sample {sample_id} does not match the digest in its name"


def main() -> int:
    """Returns 0 for a whole ledger, 1 for one that is damaged or cannot be opened."""
    configure_logging("buffer")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    try:
        store = open_store(BufferSection.model_validate({"buffer_store": kind}), folder, "run")
        contents = verify(store, folder / "columns")
        store.close()
    except (HeadraceError, OSError, ValueError) as error:
        print(error, file=sys.stderr)  # noqa: T201  # the parent reads it
        return 1
    print(json.dumps(asdict(contents)))  # noqa: T201  # the parent reads it
    return 1 if contents.damaged else 0


if __name__ == "__main__":
    sys.exit(main())
