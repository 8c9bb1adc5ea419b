"""What a buffer holds does not grow with a run's steps, in any of its tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.ledger_under_test import LedgerUnderTest


def tables(root: object) -> Iterator[tuple[int, str]]:
    """Every collection that the buffer's objects below `root` hold: its size and who has it."""
    seen, left = set[int](), deque([("", root)])
    while left:
        name, one = left.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            yield len(one), name
            left.extend((name, each) for each in (*one.keys(), *one.values()))
        elif isinstance(one, list | tuple | set | frozenset | deque):
            yield len(one), name
            left.extend((name, each) for each in one)
        elif type(one).__module__.startswith("services.buffer"):
            fields = [*getattr(one, "__dict__", ()), *getattr(type(one), "__slots__", ())]
            found = ((field, getattr(one, field, None)) for field in fields)
            left.extend((f"{type(one).__name__}.{field}", each) for field, each in found)


def test_no_table_of_the_ledger_or_its_store_grows_with_steps(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger", large_call_bytes=1)
    it = LedgerUnderTest(store, retain_events=50)
    it.create(retain_steps=2, lease_seconds=60.0)
    epoch = it.rewind()
    sizes = []
    for step in range(120):
        it.submit(*(f"q{step}-{i}" for i in range(2)))
        for group in it.lease():
            it.do((it.ledger.renew(it.now, [group.live_lease.lease_id]), it.ledger.delete_ended(it.now, "train")[1]))
            it.put([group])
        it.consume(epoch, step)
        it.serve(epoch, step + 1)
        it.commit(epoch, step + 1)
        it.do(it.ledger.delete_ended(it.now, "train"))
        it.seconds += 1.0
        if step % 60 == 59:
            sizes.append(sum(size for size, _ in tables((it.ledger, store))))
    before, after = sizes
    store.close()
    assert after < before + 60, sorted(tables((it.ledger, store)))[-10:]
