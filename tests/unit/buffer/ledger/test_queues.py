"""The order in which groups and leases wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.buffer.ledger.queues import NameQueue, ReadyPool
from services.buffer.ledger.stream import Selection
from tests.support.ledgers.ledger_under_test import LedgerUnderTest


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.integers(0, 50), st.none(), st.just("take")))))
def test_the_smallest_key_comes_first_whatever_comes_leaves_and_moves(
    actions: list[tuple[int, int | str | None]],
) -> None:
    """A name with a number is added or moved, one with None is discarded."""
    queue, model = NameQueue[tuple[int, int]](), dict[str, tuple[int, int]]()
    for number, (name, action) in enumerate(actions):
        if action == "take":
            smallest = min(model, key=lambda name: model[name], default=None)
            assert queue.first() == (None if smallest is None else (model[smallest], smallest))
            assert queue.take(1) == ([] if smallest is None else [smallest])
            model.pop(smallest or "", None)
        elif action is None:
            queue.discard(str(name))
            model.pop(str(name), None)
        else:
            assert isinstance(action, int)
            queue.add(str(name), (action, number))
            model[str(name)] = (action, number)
        assert len(queue) == len(model)
    assert queue.sorted() == sorted(model, key=lambda name: model[name]) == queue.take(len(model))


def test_a_pool_that_is_never_asked_for_old_groups_does_not_grow() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=None)
    it.submit(*(f"q{i}" for i in range(400)))
    pool = ReadyPool(Selection.FIFO)
    for group in it.lease(400):
        it.put([group])
        pool.add(it.ledger.stream("train").groups[group.group_id])
        assert pool.first(1) == [group.group_id]
        assert sum(len(q._line) + len(q._heap) for q in (pool._chosen, pool._oldest)) < 200
