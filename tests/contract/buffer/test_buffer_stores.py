"""What every store of the ledger keeps: the same tests against each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.errors import FailedPrecondition, NotFound, ResourceExhausted
from services.buffer.ledger.group import GroupState, NewSample, Prompt
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.operate import Dropped, Retried
from services.buffer.ledger.produce import PutOutcome, Release
from services.buffer.ledger.stream import FileSource, Selection
from services.buffer.store.base import Store
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, complete, sample, without_samples
from tests.support.ledgers.mixed_ledger import Mixed
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


def test_a_reopened_store_knows_the_bytes_of_columns_out_of_line(store: Store, reopen: Reopen) -> None:
    it = LedgerUnderTest(store)
    it.create(groups_per_step=1, max_staleness=3)
    it.submit("a", "b")
    whole, unfinished = it.lease(2)
    put = complete(whole)
    samples = tuple(with_columns(sample, 1_000 + i) for i, sample in enumerate(put.samples))
    it.do(it.ledger.put(it.now, [replace(put, samples=samples)]))
    partial = with_columns(sample(unfinished, 0, 0), 50)
    it.do(it.ledger.release(it.now, [Release(unfinished.lease.lease_id, (partial,), "stop")]))
    held = it.ledger.stream("train").stored_bytes
    it.store = reopen(store)
    it.restart()
    groups = it.ledger.stream("train").groups
    assert [record.column_bytes for record in groups[whole.group_id].samples] == [1_000, 1_001]
    assert [record.column_bytes for record in groups[unfinished.group_id].partials] == [50]
    assert it.ledger.stream("train").stored_bytes == held > 2_051
    it.store.close()


def with_columns(sample: NewSample, num_bytes: int) -> NewSample:
    return replace(sample, record=replace(sample.record, column_bytes=num_bytes))


def test_failed_groups_are_tried_again_once_for_each_request_and_keep_their_story(store: Store, reopen: Reopen) -> None:
    it = LedgerUnderTest(store)
    it.create(max_staleness=None, max_attempts=2)
    it.submit("a", "b", "c")
    for _ in range(2):
        it.do(it.ledger.put(it.now, [without_samples(group, PutOutcome.FAILED, "DOWN") for group in it.lease(2)]))
    first, second, third = it.states()
    assert it.do(it.ledger.retry(it.now, "train", "mended", [first])) == Retried(1, 1)
    it.store = reopen(store)
    it.restart()
    assert it.do(it.ledger.retry(it.now, "train", "mended", [first])) == Retried(1, 1)
    assert it.states() == {first: GroupState.QUEUED, second: GroupState.FAILED, third: GroupState.QUEUED}
    with pytest.raises(FailedPrecondition, match="train/2 is QUEUED, only FAILED ones are tried again"):
        it.ledger.retry(it.now, "train", "other", [second, third])
    assert it.do(it.ledger.retry(it.now, "train", "all", [])) == Retried(1, 0)
    leased = it.lease()
    assert [(group.group_id, group.attempts, group.failure) for group in leased[:2]] == [
        (first, 1, None),
        (second, 1, None),
    ]
    assert {result.state for result in it.put(leased)} == {GroupState.READY}
    told = [event.detail for event in it.store.read_events(1, 100) if event.kind == "retried"]
    assert told == ["DOWN: for the test"] * 2
    it.store.close()


def test_dropped_groups_and_dissolved_batches_are_so_after_a_restart(store: Store, reopen: Reopen) -> None:
    it = busy_ledger(store)
    first, second = it.batch(2, 1).groups
    dropped = it.do(it.ledger.drop(it.now, "train", "poison", [first.group_id, "train/11"], "poison"))
    assert dropped == Dropped(2, 1)
    before = contents(it.ledger)
    it.store = reopen(store)
    it.restart()
    assert contents(it.ledger) == before
    assert it.do(it.ledger.drop(it.now, "train", "poison", [first.group_id, "train/11"], "poison")) == dropped
    assert it.batch(2, 1).groups[0].group_id == second.group_id
    with pytest.raises(NotFound):
        it.store.read_payloads(first.samples)
    it.store.close()


def test_a_retry_keeps_the_limits_of_the_queue(store: Store) -> None:
    it = LedgerUnderTest(store)
    it.create(max_staleness=None, max_attempts=1, max_queued_groups=2)
    it.submit("a", "b")
    it.do(it.ledger.put(it.now, [without_samples(group, PutOutcome.FAILED) for group in it.lease()]))
    it.submit("c")
    with pytest.raises(ResourceExhausted, match="max_queued_groups 2"):
        it.ledger.retry(it.now, "train", "all", [])
    store.close()


def test_shares_and_sources_of_a_mix_are_kept(store: Store, reopen: Reopen) -> None:
    it = Mixed(store, rows={"chat": 2})
    it.create_mixed()
    epoch = it.rewind()
    for step in range(3):
        it.train_step(epoch, step)
    it.submit("outside")
    before = contents(it.ledger)
    assert it.ledger.stream("train").state.taken == (16, 6, 2)
    it.store = reopen(store)
    it.restart()
    assert contents(it.ledger) == before
    assert {group.source for group in it.ledger.stream("train").groups.values()} == {0, 1, 2, None}
    it.store.close()


def test_a_store_that_is_open_loads_what_was_committed_since(store: Store) -> None:
    it = busy_ledger(store)
    before = contents(it.ledger)
    it.restart()
    assert contents(it.ledger) == before


def test_the_history_is_kept_in_order_and_read_from_any_position(store: Store, reopen: Reopen) -> None:
    it = busy_ledger(store)
    events = reopen(store).read_events(0, 1000)
    assert [e.position for e in events] == list(range(1, it.ledger.position + 1))
    assert events[0].kind == "stream_created"
    assert {e.kind for e in events} >= {"submitted", "leased", "put", "dropped", "released", "batched", "committed"}
    assert next(e for e in events if e.kind == "dropped").state is GroupState.DROPPED


def test_a_page_of_history_starts_where_it_was_asked(store: Store) -> None:
    busy_ledger(store)
    assert [e.position for e in store.read_events(5, 3)] == [5, 6, 7]
    assert store.read_events(10_000, 3) == []


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
