"""A lease that is given back: its tokens stay, and nothing is counted against the group."""

from __future__ import annotations

import pytest

from headrace.errors import NotFound
from headrace.trajectory import Failure
from services.buffer.ledger.produce import GroupPut, PutOutcome, Release
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, sample


@pytest.fixture
def it() -> LedgerUnderTest:
    ledger = LedgerUnderTest()
    ledger.create()
    ledger.submit(*(f"p{i}" for i in range(12)))
    return ledger


def test_a_release_keeps_its_tokens_and_does_not_count_as_an_attempt(it: LedgerUnderTest) -> None:
    (group,) = it.lease(1)
    partial = sample(group, 0, 0, text="so far")
    give = [Release(group.lease.lease_id, (partial,), "shutting down")]
    it.do(it.ledger.release(it.now, give))
    it.do(it.ledger.release(it.now, give))
    it.restart()
    (again,) = it.lease(1)
    assert (again.group_id, again.attempts) == (group.group_id, 1)
    assert it.store.read_payloads(again.partials) == [partial.payload]
    it.put([again])
    with pytest.raises(NotFound):
        it.store.read_payloads(again.partials)


def test_a_release_without_tokens_leaves_those_of_an_earlier_one(it: LedgerUnderTest) -> None:
    (group,) = it.lease(1)
    partial = sample(group, 0, 0, text="so far")
    for partials in ((partial,), ()):
        it.do(it.ledger.release(it.now, [Release(group.lease.lease_id, partials, "shutting down")]))
        (group,) = it.lease(1)
        assert it.store.read_payloads(group.partials) == [partial.payload]


@pytest.mark.parametrize("end", ["newer tokens", "a failure", "no signal", "an operator", "its stream"])
def test_tokens_that_nobody_needs_any_more_are_deleted(end: str) -> None:
    it = LedgerUnderTest()
    it.create(max_attempts=1)
    it.submit("p")
    (group,) = it.lease(1)
    partial = sample(group, 0, 0, text="so far")
    it.do(it.ledger.release(it.now, [Release(group.lease.lease_id, (partial,), "shutting down")]))
    (again,) = it.lease(1)
    assert it.store.read_payloads(again.partials) == [partial.payload]
    if end == "newer tokens":
        newer = sample(again, 0, 0, text="further")
        it.do(it.ledger.release(it.now, [Release(again.lease.lease_id, (newer,), "shutting down")]))
    elif end == "an operator":
        it.do(it.ledger.drop(it.now, "train", "request", [group.group_id], "poison"))
    elif end == "its stream":
        it.do(it.ledger.delete_stream(it.now, "train", force=True))
        while it.do(it.ledger.purge_deleted(it.now, "train")):
            pass
    else:
        outcome = PutOutcome.FAILED if end == "a failure" else PutOutcome.DROPPED
        put = GroupPut(again.lease.lease_id, again.group_id, outcome, failure=Failure("OVER", "it is over"))
        it.do(it.ledger.put(it.now, [put]))
    with pytest.raises(NotFound):
        it.store.read_payloads(again.partials)
