"""What every store of the ledger keeps: the same tests against each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import NotFound
from services.buffer.ledger.group import GroupState, Prompt
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.produce import PutOutcome, Release
from services.buffer.ledger.stream import FileSource, Selection
from services.buffer.store.base import Store
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, sample, without_samples
from tests.support.ledgers.stores import STORES, reopened
from tests.support.processes.postgres import needs_postgres

Reopen = Callable[[Store], Store]


@pytest.fixture(params=[pytest.param(kind, marks=needs_postgres if kind == "postgres" else ()) for kind in STORES])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Store:
    return STORES[kind](tmp_path)


@pytest.fixture
def reopen(kind: str, tmp_path: Path) -> Reopen:
    return lambda store: reopened(kind, store, tmp_path)


def busy_ledger(store: Store) -> LedgerUnderTest:
    """Groups in every state, with partial samples, failures and two epochs."""
    it = LedgerUnderTest(store)
    source = FileSource("/data/p.jsonl", "prompt", label_key="label", shuffle=True, seed=3, num_epochs=2)
    it.create(max_staleness=3, files=(source,), selection=Selection.PRIORITY)
    it.submit(*(f"é {i}" for i in range(12)), priority=-4)
    epoch = it.rewind()
    groups = it.lease()
    it.do(it.ledger.put(it.now, [without_samples(groups[0], PutOutcome.DROPPED)]))
    it.put(groups[1:7])
    it.do(it.ledger.release(it.now, [Release(groups[7].lease.lease_id, (sample(groups[7], 0, 0),), "stop")]))
    for step in range(2):
        it.consume(epoch, step)
        it.serve(epoch, step + 1)
    it.commit(epoch, 1)
    it.rewind(1)
    return it


def contents(ledger: Ledger) -> tuple[object, ...]:
    stream = ledger.stream("train")
    return (
        stream.state,
        stream.groups,
        stream.counts,
        stream.payload_bytes,
        stream.samples,
        stream.prompts,
        ledger.position,
    )


def test_a_reopened_store_gives_the_ledger_back(store: Store, reopen: Reopen) -> None:
    it = busy_ledger(store)
    before = contents(it.ledger)
    it.store = reopen(store)
    it.restart()
    assert contents(it.ledger) == before
    it.store.close()


def test_the_history_is_kept_in_order_and_read_from_any_position(store: Store, reopen: Reopen) -> None:
    it = busy_ledger(store)
    events = reopen(store).read_events(0, 1000)
    assert [e.position for e in events] == list(range(1, it.ledger.position + 1))
    assert events[0].kind == "stream_created"
    assert {e.kind for e in events} >= {"submitted", "leased", "put", "dropped", "released", "batched", "committed"}
    assert next(e for e in events if e.kind == "dropped").state is GroupState.DROPPED


def test_old_events_are_deleted_and_the_ledger_goes_on_after_a_restart(store: Store, reopen: Reopen) -> None:
    it = LedgerUnderTest(store, retain_events=40)
    it.create(max_staleness=None)
    for i in range(100):
        it.submit(f"q{i}")
    oldest = it.ledger.oldest_position
    for _ in range(2):
        assert 40 <= it.ledger.position + 1 - it.ledger.oldest_position <= 40 + 40 // 8
        assert it.store.load().oldest_position == it.ledger.oldest_position == oldest
        assert it.store.load().position == it.ledger.position
        kept = list(range(oldest, it.ledger.position + 1))
        for first in (0, 1, oldest):
            assert [e.position for e in it.store.read_events(first, 1_000)] == kept
        assert [e.position for e in it.store.read_events(oldest + 3, 5)] == kept[3:8]
        it.store = reopen(it.store)
        it.restart()
    it.submit(*(f"later{i}" for i in range(10)))
    assert it.store.load().oldest_position == it.ledger.oldest_position > oldest
    it.store.close()


def test_payloads_are_those_that_were_put_until_they_are_committed(store: Store, reopen: Reopen) -> None:
    it = busy_ledger(store)
    store = reopen(store)
    groups = it.ledger.stream("train").groups.values()
    held = [r for g in groups for r in g.records]
    assert [len(p) for p in store.read_payloads(held)] == [r.payload_bytes for r in held]
    assert store.read_payloads(held[::-1]) == store.read_payloads(held)[::-1]
    gone = [r for g in groups if g.state is GroupState.COMMITTED for r in g.samples]
    assert gone
    with pytest.raises(NotFound, match="its group expired or was committed"):
        store.read_payloads(gone)


def test_forgotten_groups_are_gone_with_their_prompts(store: Store, reopen: Reopen) -> None:
    it = LedgerUnderTest(store)
    it.create(retain_steps=0)
    it.submit("a", "b", "c")
    epoch = it.rewind()
    it.train_step(epoch, 0)
    it.commit(epoch, 1)
    it = LedgerUnderTest(reopen(store))
    stream = it.ledger.stream("train")
    assert list(stream.groups) == ["train/2"]
    assert list(it.store.damage()) == []  # neither a group without its prompt nor a prompt without its group
    assert stream.state.forgotten == {"COMMITTED": 2}
    assert it.submit("a") == ["train/3"]


def test_transactions_committed_together_are_all_there(store: Store, reopen: Reopen) -> None:
    it = LedgerUnderTest(store)
    it.create(max_staleness=None)
    transactions = [it.ledger.submit(it.now, "train", [_prompt(i)])[1] for i in range(5)]
    store.commit(transactions)
    it.store = reopen(store)
    it.restart()
    assert len(it.lease()) == 5


def _prompt(i: int) -> Prompt:
    return Prompt(f"p{i}", b"body")
