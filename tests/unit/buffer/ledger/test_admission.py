"""Whoever is held back, and what is said of it."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidArgument
from services.buffer.ledger.group import GroupState
from services.buffer.ledger.limiter import Limiter
from services.buffer.ledger.produce import GroupPut, NoLeaseReason, PutOutcome, Release
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, complete, sample


def test_a_version_ahead_of_the_steps_gives_no_places() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=0, groups_per_step=2)
    it.submit(*"abcdef")
    it.serve(it.rewind(), 3)
    assert len(it.lease()) == 2


def test_the_limiter_says_that_it_is_the_one_who_holds_producers() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=None, groups_per_step=1, limiter=Limiter(1, 1.0, 1.0))
    it.submit(*"abcdef")
    it.lease()
    assert it.ledger.no_lease_reason("train") is NoLeaseReason.LIMITER


def test_groups_that_are_out_count_as_inserted_for_the_limiter() -> None:
    limiter = Limiter(min_size=1, samples_per_insert=0.5, error_buffer=2.0)
    left = [limiter.inserts_left(num_inserted=2, num_taken=1, num_leased=leased) for leased in (0, 3, 5, 9)]
    assert left == [5, 2, 0, 0]


def test_of_staleness_and_limiter_the_stricter_one_counts() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=4, groups_per_step=2, limiter=Limiter(1, 1.0, 2.0))
    it.submit(*"abcdefgh")
    assert len(it.lease()) == 3


def test_a_request_that_comes_again_is_told_the_leases_that_still_live() -> None:
    it = LedgerUnderTest()
    it.create()
    it.submit("a", "b")
    first, second = it.do(it.ledger.lease(it.now, "train", "p", "same", 2))
    it.put([first])
    assert it.do(it.ledger.lease(it.now, "train", "p", "same", 2)) == [second]


def test_a_lease_says_how_long_it_still_lives() -> None:
    it = LedgerUnderTest()
    it.create(lease_seconds=60.0)
    it.submit("a")
    (group,) = it.lease()
    it.seconds += 20
    assert it.ledger.lease_seconds_left(it.now, group.lease.lease_id) == 40.0
    it.seconds += 100
    assert it.ledger.lease_seconds_left(it.now, group.lease.lease_id) == 0.0


def test_a_call_that_names_the_same_thing_twice_is_refused() -> None:
    it = LedgerUnderTest()
    it.create()
    it.submit("a", "b")
    first, second = it.lease()
    with pytest.raises(InvalidArgument, match="group_id"):
        it.ledger.put(it.now, [complete(first), complete(first)])
    same = tuple(sample(second, i, 0, sample_id=f"{first.lease.lease_id}/{i}") for i in range(2))
    put = GroupPut(second.lease.lease_id, second.group_id, PutOutcome.COMPLETE, same)
    with pytest.raises(InvalidArgument, match="sample_id"):
        it.ledger.put(it.now, [complete(first), put])
    with pytest.raises(InvalidArgument, match="lease_id"):
        it.ledger.release(it.now, [Release(first.lease.lease_id), Release(first.lease.lease_id)])
    assert set(it.states().values()) == {GroupState.LEASED}
