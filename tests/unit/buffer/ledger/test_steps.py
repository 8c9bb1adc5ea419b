"""Steps of the trainer at their edges: ahead, back, in parts, of several sources."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.errors import FailedPrecondition, NotFound
from headrace.limits import MAX_STEPS_AHEAD
from services.buffer.ledger import train, work
from services.buffer.ledger.group import GroupState, NewSample, Prompt
from services.buffer.ledger.produce import GroupPut, PutOutcome
from services.buffer.ledger.stream import Cursor, ExpiryAction, FileSource
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, sample


@pytest.fixture
def it() -> LedgerUnderTest:
    ledger = LedgerUnderTest()
    ledger.create(max_staleness=4, retain_steps=0)
    ledger.submit(*(f"p{i}" for i in range(10)))
    ledger.put(ledger.lease())
    return ledger


def test_samples_without_a_version_are_as_old_as_their_lease() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=1)
    it.submit("a")
    it.serve(it.rewind(5), 5)
    (group,) = it.lease()
    new = [sample(group, i, 0) for i in range(2)]
    samples = tuple(NewSample(replace(one.record, oldest_version=None), one.payload) for one in new)
    put = GroupPut(group.lease.lease_id, group.group_id, PutOutcome.COMPLETE, samples)
    (result,) = it.do(it.ledger.put(it.now, [put]))
    assert result.state is GroupState.READY
    assert it.ledger.stream("train").groups[group.group_id].oldest_version == 5


def test_without_staleness_nothing_expires_for_a_step_that_is_asked_for_ahead() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=0, over_sampling_groups=1)
    it.submit("a", "b", "c")
    epoch = it.rewind()
    it.put(it.lease())
    assert it.batch(epoch, 0)
    assert it.batch(epoch, 1) is None
    assert set(it.states().values()) == {GroupState.READY}


def test_a_batch_counts_for_the_sources_of_its_groups() -> None:
    it = LedgerUnderTest()
    it.create(files=(FileSource("a.jsonl", "prompt"), FileSource("b.jsonl", "prompt")))
    prompts = [[Prompt("a", b"a"), Prompt("b", b"b")], [Prompt("c", b"c")]]
    it.do(it.ledger.read(it.now, "train", prompts, [Cursor(), Cursor()], [False, False]))
    it.put(it.lease())
    assert it.batch(it.rewind(), 0)
    assert it.ledger.stream("train").state.taken == (1, 1)


def test_committing_an_earlier_step_again_changes_nothing(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    for step in (0, 1):
        it.consume(epoch, step)
    assert [it.commit(epoch, step) for step in (2, 1)] == [4, 0]
    assert it.ledger.stream("train").state.committed_step == 2


def test_a_rewind_opens_the_epoch_that_was_asked_for_and_counts_what_came_back_before(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    it.consume(epoch, 0)
    assert it.do(it.ledger.rewind(it.now, "train", 0, "r", 7, num_back=3)) == (7, 2 + 3)


def test_a_step_or_an_epoch_further_ahead_than_any_run_is_refused(it: LedgerUnderTest) -> None:
    with pytest.raises(FailedPrecondition, match="step .* is more than"):
        it.ledger.rewind(it.now, "train", MAX_STEPS_AHEAD + 1, "r")
    with pytest.raises(FailedPrecondition, match="least_epoch .* is more than"):
        it.ledger.rewind(it.now, "train", 0, "r", MAX_STEPS_AHEAD + 1)
    assert it.do(it.ledger.rewind(it.now, "train", MAX_STEPS_AHEAD, "r")) == (1, 0)


def test_many_steps_are_committed_and_rewound_in_parts(it: LedgerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "MAX_CHANGES", 4)  # two steps of two groups
    epoch = it.rewind()
    for step in range(5):
        it.consume(epoch, step)
    assert train.commit_steps(it.ledger.stream("train"), epoch, 5) == [2, 4, 5]
    assert train.rewind_steps(it.ledger.stream("train"), 0, "r", 0) == [4, 2]
    assert train.commit_steps(it.ledger.stream("train"), epoch, 2) == [2]


def test_groups_past_retention_are_forgotten_in_parts(it: LedgerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = it.rewind()
    for step in (0, 1):
        it.consume(epoch, step)
    monkeypatch.setattr(train, "MAX_CHANGES", 3)
    it.commit(epoch, 2)
    state = it.ledger.stream("train").state
    assert (state.forgotten, state.forgotten_step) == ({"COMMITTED": 3}, 0)
    assert it.do(it.ledger.delete_ended(it.now, "train")) == 1
    state = it.ledger.stream("train").state
    assert (state.forgotten, state.forgotten_step) == ({"COMMITTED": 4}, 2)


def test_no_batch_is_made_while_stale_groups_may_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (train, work):
        monkeypatch.setattr(module, "MAX_CHANGES", 2)
    it = LedgerUnderTest()
    it.create(max_staleness=1, over_sampling_groups=4)
    it.submit(*(f"p{i}" for i in range(8)))
    it.put(it.lease())
    epoch = it.rewind(2)
    assert it.serve(epoch, 2) == 2
    assert [it.batch(epoch, 2) for _ in range(4)] == [None] * 4
    assert set(it.states().values()) == {GroupState.QUEUED}


def test_an_epoch_that_nobody_has_opened_is_not_heard(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    with pytest.raises(FailedPrecondition, match="was never opened here"):
        it.batch(epoch + 1, 0)
    assert it.batch(epoch, 0)


@pytest.mark.parametrize("action", list(ExpiryAction))
def test_the_samples_of_a_group_that_expires_are_deleted(action: ExpiryAction) -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=1, expiry_action=action)
    it.submit("a")
    (group,) = it.lease()
    it.put([group])
    records = it.ledger.stream("train").groups[group.group_id].samples
    assert len(it.store.read_payloads(records)) == 2
    assert it.serve(it.rewind(2), 2) == 1
    for record in records:
        with pytest.raises(NotFound):
            it.store.read_payloads([record])


def test_a_prompt_whose_group_was_forgotten_may_be_submitted_again(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    it.consume(epoch, 0)
    it.commit(epoch, 1)
    assert it.submit("p0", "p2") == ["train/10", "train/2"]
