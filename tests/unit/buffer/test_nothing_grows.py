"""What a buffer holds does not grow with a run's steps: not in any of its tables, nor in SQLite's page caches."""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from headrace.client.buffer import BufferClient
from headrace.errors import HeadraceError
from services.buffer.runtime.prompt_sources import Locks
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore, connect
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.ledgers.ledger_under_test import LedgerUnderTest
from tests.support.processes.buffer_server import served_buffer

_PAGES_BYTES = 12 << 20


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


@pytest.mark.parametrize("lease_seconds", [60.0, 1e9])
def test_no_table_of_the_ledger_or_its_store_grows_with_steps(tmp_path: Path, lease_seconds: float) -> None:
    store = SqliteStore(tmp_path / "ledger", large_call_bytes=1)
    it = LedgerUnderTest(store, retain_events=50)
    it.create(retain_steps=2, lease_seconds=lease_seconds)
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


async def test_names_of_streams_that_do_not_exist_leave_no_trace() -> None:
    async with served_buffer(MemoryStore()) as (buffer, server), BufferClient(server.address) as client:
        before = sum(size for size, _ in tables(buffer))
        for number in range(50):
            name = f"nobody/{number}"
            assert not await client.delete_stream(name)
            for call in (
                client.submit_prompts(name, text_prompts("q")),
                client.commit(name, 1, 1),
                client.rewind(name, 0),
                client.stats(name),
                client.lease_groups(name, "producer", 1),
            ):
                with pytest.raises(HeadraceError, match="there is no stream"):
                    await call
        assert sum(size for size, _ in tables(buffer)) < before + 50


async def test_a_lock_is_one_for_its_name_and_is_forgotten_when_nobody_has_it() -> None:
    locks, order = Locks(), list[str]()

    async def hold(name: str, word: str) -> None:
        async with locks[name]:
            order.append(f"{word} begins")
            await asyncio.sleep(0)
            order.append(f"{word} ends")

    await asyncio.gather(hold("a", "first"), hold("a", "second"), hold("b", "other"))
    assert order.index("first ends") < order.index("second begins")
    assert order.index("other begins") < order.index("first ends")
    assert len(locks) == 0


def test_sqlites_page_cache_is_full_soon(tmp_path: Path) -> None:
    """What it holds is in glibc's heap: several times as many rows as fit into it must not take as much."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("the C library does not count its heap")
    mallinfo2.restype = _Heap
    with closing(connect(tmp_path / "ledger.sqlite")) as database:
        database.execute("CREATE TABLE bodies (body BLOB)")
        before = mallinfo2().uordblks
        for _ in range(0, _PAGES_BYTES // 4_000, 256):
            database.executemany("INSERT INTO bodies VALUES (?)", [(bytes(3_000),) for _ in range(256)])
        assert mallinfo2().uordblks - before < _PAGES_BYTES / 2


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2; `uordblks` is what is in use."""

    _fields_ = [*((f"field_{i}", ctypes.c_size_t) for i in range(7)), ("uordblks", ctypes.c_size_t)] + [
        (f"further_{i}", ctypes.c_size_t) for i in range(2)
    ]
