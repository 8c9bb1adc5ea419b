"""The order in which groups and leases wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.buffer.ledger.queues.heap import NameHeap
from services.buffer.ledger.queues.ready_pool import ReadyPool
from services.buffer.ledger.stream import Selection
from tests.support.ledgers.ledger_under_test import LedgerUnderTest


@given(st.lists(st.one_of(st.integers(0, 50), st.none())))
def test_the_smallest_key_comes_first_whatever_the_order_of_coming(actions: list[int | None]) -> None:
    """A number is added, None takes one."""
    queue, model = NameHeap[tuple[int, int]](), list[tuple[tuple[int, int], str]]()
    for number, action in enumerate(actions):
        if action is None:
            assert queue.first() == (min(model) if model else None)
            if model:
                model.remove(queue.pop())
        else:
            queue.add((action, number), str(number))
            model.append(((action, number), str(number)))
        assert len(queue) == len(model)
    queue.retain(lambda key, _: key[0] % 2 == 0)
    assert [queue.pop() for _ in range(len(queue))] == sorted(entry for entry in model if entry[0][0] % 2 == 0)


def test_a_pool_that_is_never_asked_for_old_groups_does_not_grow() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=None)
    it.submit(*(f"q{i}" for i in range(400)))
    pool = ReadyPool(Selection.FIFO)
    for group in it.lease(400):
        it.put([group])
        pool.add(it.ledger.stream("train").groups[group.group_id])
        assert pool.first(1) == [group.group_id]
        assert len(pool._chosen) + len(pool._oldest) < 100
