"""What an operator drops is never trained; a batch that had it is dissolved, and the step gets another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.operate import Dropped
from services.buffer.ledger.produce import PutOutcome
from services.buffer.store.base import Snapshot
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, without_samples


def drop(it: LedgerUnderTest, *group_ids: str, request_id: str = "one") -> Dropped:
    return it.do(it.ledger.drop(it.now, "train", request_id, group_ids, "poison"))


def ids(groups: Sequence[Group]) -> list[str]:
    return [group.group_id for group in groups]


def busy(**config: Any) -> tuple[LedgerUnderTest, int]:
    """Ten prompts, none leased."""
    it = LedgerUnderTest()
    it.create(**{"max_staleness": 2, **config})
    it.submit(*(f"q{i}" for i in range(10)))
    return it, it.rewind()


def test_groups_of_every_unconsumed_state_are_dropped_with_the_reason_and_without_their_payloads() -> None:
    it, _ = busy(max_staleness=None, max_attempts=1)
    leases = it.lease(5)
    it.put(leases[:3])
    it.do(it.ledger.put(it.now, [without_samples(leases[3], PutOutcome.FAILED)]))
    named = {ids(leases)[i]: state for i, state in ((0, "READY"), (3, "FAILED"), (4, "LEASED"))} | {
        "train/7": GroupState.QUEUED
    }
    assert {group_id: it.states()[group_id] for group_id in named} == named
    assert drop(it, *named) == Dropped(4, 0)
    for group_id in named:
        group = it.ledger.stream("train").groups[group_id]
        assert (group.state, group.samples, group.lease) == (GroupState.DROPPED, (), None)
        assert group.failure is not None
        assert (group.failure.reason, group.failure.message) == ("OPERATOR", "poison")
    assert it.put([leases[4]])[0].refused is not None
    with pytest.raises(NotFound):
        it.ledger.sample_records("train", [f"{leases[0].lease.lease_id}/0"])
    held = {group_id for group_id, group in it.ledger.stream("train").groups.items() if group.records}
    assert held == set(ids(leases)[1:3])
    assert isinstance(it.store, MemoryStore)
    assert len(it.store._payloads) == 4
    assert [group.group_id for group in it.lease()] == ["train/5", "train/6", "train/8", "train/9"]


def test_a_batch_that_is_not_consumed_is_dissolved_and_chosen_again_in_order() -> None:
    it, epoch = busy()
    it.put(it.lease())
    first = ids(it.batch(epoch, 0).groups)
    ahead = ids(it.batch(epoch, 1).groups)
    digest = it.batch(epoch, 0).digest
    assert drop(it, first[0]) == Dropped(1, 1)
    with pytest.raises(FailedPrecondition, match="has no batch yet"):
        it.ledger.consume(it.now, "train", epoch, 0, digest)
    again = ids(it.batch(epoch, 0).groups)
    assert again == [first[1], "train/4"]
    with pytest.raises(FailedPrecondition) as refused:
        it.ledger.consume(it.now, "train", epoch, 0, digest)
    assert refused.value.reason == "OTHER_BATCH"
    it.restart()
    assert ids(it.batch(epoch, 0).groups) == again
    assert ids(it.consume(epoch, 0).groups) == again
    assert ids(it.batch(epoch, 1).groups) == ahead
    told = [(event.kind, event.group_id, event.step) for event in it.store.read_events(1, 1_000)]
    assert told[told.index(("dropped", first[0], 0)) + 1] == ("unbatched", first[1], 0)


def test_what_is_consumed_or_committed_is_refused_and_nothing_of_the_call_is_done() -> None:
    it, epoch = busy()
    batches = [ids(it.train_step(epoch, step).groups) for step in range(2)]
    it.commit(epoch, 1)
    for group_id, reason, way_out in (
        (batches[0][0], "COMMITTED", "checkpoint"),
        (batches[1][0], "CONSUMED", "Rewind"),
    ):
        before = it.states()
        with pytest.raises(FailedPrecondition, match=f"{group_id} is {reason}.*{way_out}") as refused:
            it.ledger.drop(it.now, "train", "other", ["train/9", group_id], "poison")
        assert (refused.value.reason, it.states()) == (reason, before)
    with pytest.raises(NotFound):
        it.ledger.drop(it.now, "train", "other", ["train/9", "train/99"], "poison")
    with pytest.raises(InvalidArgument, match="comes twice"):
        it.ledger.drop(it.now, "train", "other", ["train/9", "train/9"], "poison")
    it.rewind(1)
    assert drop(it, batches[1][0]) == Dropped(1, 1)


def test_the_same_request_is_done_once_also_after_a_restart_and_what_is_dropped_stays() -> None:
    it, _ = busy()
    assert drop(it, "train/3", "train/4") == Dropped(2, 0)
    it.restart()
    position = it.ledger.position
    assert drop(it, "train/3", "train/4") == Dropped(2, 0)
    assert drop(it, "train/5", request_id="one") == Dropped(2, 0)
    assert drop(it, "train/3", request_id="another") == Dropped(0, 0)
    assert it.ledger.position == position
    assert it.states()["train/5"] is GroupState.QUEUED


def test_one_call_dissolves_no_more_groups_than_a_step_may_have() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=None, groups_per_step=1_500)
    it.submit(*(f"q{i}" for i in range(3_000)))
    epoch = it.rewind()
    while leases := it.lease(1_000):
        it.put(leases)
    firsts = [ids(it.batch(epoch, step).groups)[0] for step in (0, 1)]
    with pytest.raises(InvalidArgument, match="2 steps, with 3000 groups"):
        drop(it, *firsts)
    assert [drop(it, group_id, request_id=group_id) for group_id in firsts] == [Dropped(1, 1)] * 2


class Lossy(MemoryStore):
    """Loses groups, as a disk does."""

    lost: tuple[str, ...] = ()

    def lose(self, *group_ids: str, by_name: bool = True) -> None:
        for group_id in group_ids:
            del self._groups[group_id]
        self.lost = group_ids if by_name else ()

    def load(self) -> Snapshot:
        return replace(super().load(), lost_groups=self.lost)


@pytest.fixture
def lossy() -> tuple[LedgerUnderTest, int, list[str]]:
    """A ledger whose step 0 has a batch, without the batch's first group since a restart."""
    it = LedgerUnderTest(Lossy())
    it.create(max_staleness=2)
    it.submit(*(f"q{i}" for i in range(10)))
    epoch = it.rewind()
    it.put(it.lease())
    batch = ids(it.batch(epoch, 0).groups)
    return it, epoch, batch


def damage(it: LedgerUnderTest, *group_ids: str, by_name: bool = True) -> None:
    assert isinstance(it.store, Lossy)
    it.store.lose(*group_ids, by_name=by_name)
    it.restart()


def test_a_batch_that_lacks_a_lost_group_is_named_with_the_command_that_helps(
    lossy: tuple[LedgerUnderTest, int, list[str]],
) -> None:
    it, epoch, batch = lossy
    damage(it, batch[0])
    with pytest.raises(DataLoss) as refused:
        it.batch(epoch, 0)
    assert f"headrace buffer drop --stream train --group {batch[0]} --reason" in refused.value.message
    assert drop(it, batch[0]) == Dropped(1, 1)
    assert it.states()[batch[0]] is GroupState.DROPPED
    assert ids(it.consume(epoch, 0).groups) == [batch[1], "train/2"]
    it.restart()
    assert it.states()[batch[0]] is GroupState.DROPPED
    assert drop(it, batch[0], request_id="again") == Dropped(0, 0)


def test_a_lost_group_of_a_consumed_step_waits_for_the_rewind(lossy: tuple[LedgerUnderTest, int, list[str]]) -> None:
    it, epoch, batch = lossy
    it.consume(epoch, 0)
    damage(it, batch[0])
    with pytest.raises(FailedPrecondition, match="step 0, which is consumed.*Rewind"):
        drop(it, batch[0])
    epoch = it.rewind(0)
    assert drop(it, batch[0]) == Dropped(1, 1)
    assert ids(it.consume(epoch, 0).groups) == [batch[1], "train/2"]
