"""`python -m tests.support.faults.full_disk FOLDER`: a ledger on a full disk of 3 MiB. Prints what was said."""

from __future__ import annotations

import sys
from pathlib import Path

from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, complete

_PAYLOAD_CHARACTERS = 40_000
_LITTLE_BYTES = 400 << 10


def fill(folder: Path, left_bytes: int) -> None:
    """So that so many bytes are left, about."""
    with (folder / "filler").open("ab", buffering=0) as filler:
        while True:
            try:
                filler.write(bytes(4096))
            except OSError:
                break
    size = (folder / "filler").stat().st_size
    with (folder / "filler").open("r+b") as filler:
        filler.truncate(max(size - left_bytes, 0))


def payloads(it: LedgerUnderTest) -> dict[str, bytes]:
    """All that are held."""
    records = [record for group in it.ledger.stream("train").groups.values() for record in group.records]
    return {
        record.key: bytes(payload) for record, payload in zip(records, it.store.read_payloads(records), strict=True)
    }


def main() -> None:
    disk = Path(sys.argv[1])
    store = SqliteStore(disk / "ledger", large_call_bytes=50_000)
    it = LedgerUnderTest(store)
    it.create(max_staleness=None)
    epoch = it.rewind()
    it.submit(*(f"q{i}" for i in range(16)))
    for group in it.lease(12):
        it.do(it.ledger.put(it.now, [complete(group, text="x" * _PAYLOAD_CHARACTERS)]))
    it.store.close()

    fill(disk, _LITTLE_BYTES)
    it.store = store = SqliteStore(disk / "ledger", large_call_bytes=50_000)
    it.restart()
    before = store.free_bytes() or 0
    for step in range(4):
        it.consume(epoch, step)
    epoch = it.rewind(2)
    it.commit(epoch, 2)
    assert (store.free_bytes() or 0) > before + 2 * _PAYLOAD_CHARACTERS
    kept = payloads(it)
    print("committed")

    fill(disk, 0)
    store.stop_waiting()  # for space: it is this thread that makes some
    try:
        it.submit("one more" * 100_000)
    except OSError as error:
        print(error)
    it.store.close()
    fill(disk, 0)
    try:
        SqliteStore(disk / "ledger").close()
    except OSError as error:
        print(error)
    (disk / "filler").unlink()
    it.store = SqliteStore(disk / "ledger")
    it.restart()
    assert payloads(it) == kept
    it.store.close()
    print("whole")


if __name__ == "__main__":
    main()
