"""The ten promises of the ledger, on its state machine under a fake clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.digest import batch_digest, batch_digest_of_0_1
from headrace.errors import AlreadyExists, FailedPrecondition, Fenced, InvalidArgument, NotFound, ResourceExhausted
from services.buffer.ledger.group import Group, GroupState, Prompt
from services.buffer.ledger.indexed_stream import group_digest
from services.buffer.ledger.produce import GroupPut, NoLeaseReason, PutOutcome, Release
from services.buffer.ledger.stream import ExpiryAction, Selection
from services.buffer.ledger.train import StepBatch
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, complete, rewarded, sample, without_samples


@pytest.fixture
def it() -> LedgerUnderTest:
    ledger = LedgerUnderTest()
    ledger.create()
    ledger.submit(*(f"p{i}" for i in range(12)))
    return ledger


# 1. A put that was answered survives, whole.


def test_promise_1_a_put_that_was_answered_is_there_after_a_restart(it: LedgerUnderTest) -> None:
    groups = it.lease()
    it.put(groups)
    it.restart()
    ids = [f"{g.lease.lease_id}/{i}" for g in groups for i in range(2)]
    records = it.ledger.sample_records("train", ids)
    assert [p.decode().split()[0] for p in it.store.read_payloads(records)] == [
        g.lease.lease_id for g in groups for _ in range(2)
    ]


def test_promise_1_a_call_with_one_wrong_put_keeps_none_of_it(it: LedgerUnderTest) -> None:
    first, second = it.lease()
    short = complete(second)
    short = GroupPut(short.lease_id, short.group_id, short.outcome, short.samples[:1])
    with pytest.raises(InvalidArgument, match="1 samples, n_samples_per_prompt is 2"):
        it.ledger.put(it.now, [complete(first), short])
    assert it.states()[first.group_id] is GroupState.LEASED
    assert it.put([first, second])[0].state is GroupState.READY


# 2. Put is idempotent by sample id and digest.


def test_promise_2_the_same_put_again_is_a_duplicate_as_long_as_the_group_is_known(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    groups = it.lease()
    it.put(groups)
    assert [r.duplicate for r in it.put(groups)] == [True, True]
    it.consume(epoch, 0)
    it.commit(epoch, 1)
    it.restart()
    assert {(r.duplicate, r.state) for r in it.put(groups)} == {(True, GroupState.COMMITTED)}


def test_promise_2_the_same_sample_id_with_another_digest_already_exists(it: LedgerUnderTest) -> None:
    group, other = it.lease()
    it.put([group])
    with pytest.raises(AlreadyExists, match=r"another content"):
        it.ledger.put(it.now, [complete(group, text="changed")])
    stolen = tuple(sample(other, i, 0, sample_id=f"{group.lease.lease_id}/{i}") for i in range(2))
    with pytest.raises(AlreadyExists):
        it.ledger.put(it.now, [GroupPut(other.lease.lease_id, other.group_id, PutOutcome.COMPLETE, stolen)])


def test_promise_2_a_retried_put_of_a_group_that_expired_and_was_made_anew_is_a_duplicate() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=1)
    it.submit("a")
    put_of = {}
    for version in (0, 2):
        (group,) = it.lease()
        samples = tuple(sample(group, i, version, sample_id=f"{group.group_id}/{i}") for i in range(2))
        put_of[version] = GroupPut(group.lease.lease_id, group.group_id, PutOutcome.COMPLETE, samples)
        it.do(it.ledger.put(it.now, [put_of[version]]))
        if version == 0:
            assert it.serve(it.rewind(2), 2) == 1, "the group has expired"
    (again,) = it.do(it.ledger.put(it.now, [put_of[0]]))
    assert (again.duplicate, again.state) == (True, GroupState.READY)


def test_promise_2_a_retried_drop_is_a_duplicate(it: LedgerUnderTest) -> None:
    (group,) = it.lease(1)
    drop = [without_samples(group, PutOutcome.DROPPED)]
    it.do(it.ledger.put(it.now, drop))
    (again,) = it.do(it.ledger.put(it.now, drop))
    assert (again.duplicate, again.state) == (True, GroupState.DROPPED)


# 3. A live lease is exclusive.


def test_promise_3_no_group_is_leased_twice_while_its_lease_lives(it: LedgerUnderTest) -> None:
    first = it.lease(1)
    second = it.lease(1)
    assert first[0].group_id != second[0].group_id
    assert it.lease() == []


def test_promise_3_the_same_request_answers_the_same_leases(it: LedgerUnderTest) -> None:
    first = it.do(it.ledger.lease(it.now, "train", "p", "same", 1))
    assert it.do(it.ledger.lease(it.now, "train", "p", "same", 1)) == first
    it.restart()
    assert it.do(it.ledger.lease(it.now, "train", "p", "same", 1)) == first


def test_promise_3_a_late_put_is_refused_and_the_rest_of_its_call_is_kept(it: LedgerUnderTest) -> None:
    late, punctual = it.lease()
    it.seconds += 59
    assert it.ledger.renew(it.now, [punctual.lease.lease_id])[0] == [punctual.lease.lease_id]
    it.seconds += 2
    assert it.do(it.ledger.expire_leases(it.now)) == 1
    refused, kept = it.put([late, punctual])
    assert refused.refused.reason == "LEASE_LOST"
    assert (refused.state, kept.state) == (GroupState.QUEUED, GroupState.READY)
    assert it.ledger.renew(it.now, [late.lease.lease_id]) == ([], [late.lease.lease_id])


def test_promise_3_a_lost_group_goes_to_the_front_and_fails_after_its_last_attempt(it: LedgerUnderTest) -> None:
    (group,) = it.lease(1)
    for attempt in (1, 2, 3):
        assert group.attempts == attempt
        it.seconds += 60
        it.do(it.ledger.expire_leases(it.now))
        leased = it.lease(1)
        if attempt < 3:
            assert leased[0].group_id == group.group_id
            (group,) = leased
    failed = it.ledger.stream("train").groups[group.group_id]
    assert (failed.state, failed.failure.reason) == (GroupState.FAILED, "LEASE_EXPIRED")


def test_promise_3_a_restart_gives_every_lease_its_full_time(it: LedgerUnderTest) -> None:
    groups = it.lease()
    it.seconds += 59
    it.restart()
    it.seconds += 59
    assert it.do(it.ledger.expire_leases(it.now)) == 0
    assert all(r.state is GroupState.READY for r in it.put(groups))


def test_promise_3_a_renewal_at_the_same_instant_ends_the_lease_once(it: LedgerUnderTest) -> None:
    (group,) = it.lease(1)
    it.ledger.renew(it.now, [group.lease.lease_id])
    it.seconds += 60
    assert it.do(it.ledger.expire_leases(it.now)) == 1


# 4. LeaseBatch answers the same batch.


def test_promise_4_a_step_keeps_its_batch_and_its_order(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    groups = it.lease()
    assert it.batch(epoch, 0) is None
    it.put(groups[::-1])
    first = it.batch(epoch, 0)
    assert [g.group_id for g in first.groups] == [g.group_id for g in groups]
    it.restart()
    assert it.batch(epoch, 0) == first
    it.consume(epoch, 0)
    assert it.batch(epoch, 0).digest == first.digest


def test_promise_4_only_the_next_step_can_be_asked_for(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    with pytest.raises(FailedPrecondition, match="the next is 0"):
        it.ledger.lease_batch(it.now, "train", epoch, 1)


def test_promise_4_the_step_after_the_next_may_be_had_ahead_once_the_next_has_its_batch(it: LedgerUnderTest) -> None:
    it.create("async", max_staleness=1)
    it.do(it.ledger.submit(it.now, "async", [Prompt(name, b"?") for name in "abcdefgh"]))
    epoch = it.do(it.ledger.rewind(it.now, "async", 0, "first"))[0]
    leased = it.do(it.ledger.lease(it.now, "async", "producer", "all", 4))
    it.put(leased)

    def batch(step: int) -> StepBatch:
        return it.do(it.ledger.lease_batch(it.now, "async", epoch, step))  # type: ignore[return-value]

    with pytest.raises(FailedPrecondition, match="the next is 0"):
        batch(1)
    first, ahead = batch(0), batch(1)
    assert [g.group_id for g in (*first.groups, *ahead.groups)] == [g.group_id for g in leased]
    with pytest.raises(FailedPrecondition, match="the next is 0"):
        it.ledger.consume(it.now, "async", epoch, 1, ahead.digest)
    it.restart()
    it.do(it.ledger.consume(it.now, "async", epoch, 0, first.digest))
    assert batch(1).digest == ahead.digest
    assert batch(2) is None


def test_promise_7_nothing_is_had_ahead_that_would_be_too_stale_by_then(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    it.put(it.lease())
    assert it.batch(epoch, 0) is not None
    assert it.batch(epoch, 1) is None


# 5. The trainer's checkpoint decides.


def test_promise_5_a_rewind_gives_the_same_batches_for_the_same_steps(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    batches = [it.train_step(epoch, step) for step in range(3)]
    it.commit(epoch, 1)
    it.restart()
    epoch = it.rewind(1)
    rerun = [it.consume(epoch, step) for step in (1, 2)]
    assert [b.digest for b in rerun] == [b.digest for b in batches[1:]]
    assert [g.group_id for b in rerun for g in b.groups] == [g.group_id for b in batches[1:] for g in b.groups]


def test_promise_5_a_batch_given_but_not_consumed_stays_with_its_step(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    it.train_step(epoch, 0)
    it.put(it.lease())
    given = it.batch(epoch, 1)
    epoch = it.rewind(0)
    it.consume(epoch, 0)
    assert it.batch(epoch, 1).digest == given.digest


def test_promise_5_what_is_committed_cannot_be_rewound_and_its_payload_is_gone(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    batch = it.train_step(epoch, 0)
    record = batch.groups[0].samples[0]
    assert it.commit(epoch, 1) == 2
    assert it.commit(epoch, 1) == 0
    with pytest.raises(FailedPrecondition, match="deleted their samples"):
        it.ledger.rewind(it.now, "train", 0, "again")
    with pytest.raises(NotFound, match="committed"):
        it.ledger.sample_records("train", [record.sample_id])
    with pytest.raises(NotFound):
        it.store.read_payloads([record])


def test_promise_5_consuming_another_batch_than_the_given_one_is_refused(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    it.put(it.lease())
    it.batch(epoch, 0)
    with pytest.raises(FailedPrecondition, match="train on what LeaseBatch answered"):
        it.ledger.consume(it.now, "train", epoch, 0, b"\0" * 32)
    with pytest.raises(FailedPrecondition, match="consumed so far"):
        it.ledger.commit(it.now, "train", epoch, 1)


def digest_of(groups: Sequence[Group]) -> bytes:
    return batch_digest(map(group_digest, groups))


def test_promise_5_a_batchs_digest_tells_other_samples_of_the_same_groups(it: LedgerUnderTest) -> None:
    it.put(it.lease())
    batch = it.batch(it.rewind(), 0)
    assert batch is not None
    assert digest_of(batch.groups) == batch.digest
    first, second = batch.groups
    changes = ({"digest": bytes(32)}, {"envelope": b""}, {"reward": 0.5}, {"oldest_version": 9}, {"index": 5})
    for change in changes:
        other = replace(second, samples=(replace(second.samples[0], **change), *second.samples[1:]))
        assert digest_of([first, other]) != batch.digest, change
    assert digest_of([first, replace(second, samples=second.samples[::-1])]) != batch.digest
    assert digest_of([second, first]) != batch.digest
    assert digest_of([first, replace(second, group_id="another")]) != batch.digest


def test_promise_5_a_batch_that_a_buffer_of_0_1_gave_before_an_upgrade_is_consumed(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    it.put(it.lease())
    batch = it.batch(epoch, 0)
    assert batch is not None
    old = batch_digest_of_0_1((group.group_id, [record.digest for record in group.samples]) for group in batch.groups)
    assert old != batch.digest
    assert it.do(it.ledger.consume(it.now, "train", epoch, 0, old)) == 1


def test_promise_5_consuming_again_changes_nothing(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    it.put(it.lease())
    batch = it.consume(epoch, 0)
    position = it.ledger.position
    assert it.do(it.ledger.consume(it.now, "train", epoch, 0, batch.digest)) == 1
    assert it.ledger.position == position


def test_a_ledger_older_than_the_checkpoint_goes_on_at_the_checkpoints_step(it: LedgerUnderTest) -> None:
    epoch = it.rewind(100)
    assert it.lease() == []
    it.serve(epoch, 100)
    it.train_step(epoch, 100)


def test_a_batch_that_the_checkpoint_holds_is_not_given_to_a_later_step(it: LedgerUnderTest) -> None:
    fenced = it.rewind()
    it.put(it.lease())
    trained = it.batch(fenced, 0)
    assert trained is not None
    epoch = it.rewind(1)  # the fenced trainer had trained step 0 and saved before it knew
    states = it.states()
    assert {states[group.group_id] for group in trained.groups} == {GroupState.CONSUMED}
    it.serve(epoch, 1)
    later = it.train_step(epoch, 1)
    assert not {group.group_id for group in later.groups} & {group.group_id for group in trained.groups}
    assert it.commit(epoch, 2) == 4


# 6. Rewind opens an epoch and fences the older ones.


def test_promise_6_a_call_of_an_older_epoch_is_fenced(it: LedgerUnderTest) -> None:
    old = it.rewind()
    new = it.rewind()
    assert new == old + 1
    for call in (
        lambda: it.ledger.lease_batch(it.now, "train", old, 0),
        lambda: it.ledger.consume(it.now, "train", old, 0, b""),
        lambda: it.ledger.commit(it.now, "train", old, 0),
        lambda: it.ledger.set_policy_version(it.now, "train", old, 1),
    ):
        with pytest.raises(Fenced, match="a newer trainer opened epoch 2"):
            call()


def test_promise_6_a_retried_rewind_answers_its_own_epoch_even_when_it_is_over(it: LedgerUnderTest) -> None:
    first = it.rewind(request_id="trainer-1")
    second = it.rewind(request_id="trainer-2")
    it.restart()
    assert it.rewind(request_id="trainer-1") == first
    assert it.rewind(request_id="trainer-2") == second
    assert it.batch(second, 0) is None


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_promise_6_an_epoch_that_was_never_opened_is_refused(it: LedgerUnderTest, epoch: int) -> None:
    with pytest.raises(FailedPrecondition, match="call Rewind first"):
        it.ledger.lease_batch(it.now, "train", epoch, 0)


# 7. Admission is the ledger's.


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_promise_7_producers_are_held_to_max_staleness_plus_one_steps(max_staleness: int) -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=max_staleness)
    it.submit(*(f"p{i}" for i in range(20)))
    epoch = it.rewind()
    assert len(it.lease()) == 2 * (max_staleness + 1)
    assert it.ledger.no_lease_reason("train") is NoLeaseReason.ADMISSION
    it.put([g for g in it.ledger.stream("train").groups.values() if g.lease])
    it.consume(epoch, 0)
    assert it.lease() == [], "the weights of step 1 are not served yet"
    it.serve(epoch, 1)
    assert len(it.lease()) == 2


def test_promise_7_without_staleness_every_token_is_of_the_steps_own_weights(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    for step in range(5):
        batch = it.train_step(epoch, step)
        assert {g.oldest_version for g in batch.groups} == {step}


@pytest.mark.parametrize("outcome", [PutOutcome.DROPPED, PutOutcome.FAILED])
def test_promise_7_a_group_that_is_not_kept_gives_its_place_back(it: LedgerUnderTest, outcome: PutOutcome) -> None:
    first, second = it.lease()
    it.put([first])
    it.do(it.ledger.put(it.now, [without_samples(second, outcome)]))
    (replacement,) = it.lease()
    is_same = replacement.group_id == second.group_id
    assert is_same == (outcome is PutOutcome.FAILED), "a failed group is tried again first"


def test_promise_7_a_group_with_too_old_a_token_never_reaches_the_trainer() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=1)
    it.submit(*(f"p{i}" for i in range(8)))
    epoch = it.rewind()
    a, b, c, d = it.lease()
    it.put([a, b, c])
    it.consume(epoch, 0)
    it.serve(epoch, 1)
    e, f = it.lease()
    it.put([e])
    assert [g.group_id for g in it.consume(epoch, 1).groups] == [c.group_id, e.group_id]
    assert it.serve(epoch, 2) == 0
    (late,) = it.put([d])
    assert late.state is GroupState.QUEUED, "its tokens are two steps old"
    again = it.lease(1)[0]
    assert (again.group_id, again.attempts) == (d.group_id, 1)
    it.put([f, again])
    assert [g.oldest_version for g in it.batch(epoch, 2).groups] == [1, 2]


def test_promise_7_a_group_is_as_old_as_its_oldest_sample() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=1)
    it.submit("a", "b")
    first, second = it.lease()
    it.serve(it.rewind(2), 2)
    mixed = {
        group.group_id: GroupPut(
            group.lease.lease_id,
            group.group_id,
            PutOutcome.COMPLETE,
            tuple(sample(group, i, version) for i, version in enumerate(versions)),
        )
        for group, versions in ((first, (2, 0)), (second, (1, 2)))
    }
    results = it.do(it.ledger.put(it.now, list(mixed.values())))
    assert [result.state for result in results] == [GroupState.QUEUED, GroupState.READY]
    assert it.ledger.stream("train").groups[second.group_id].oldest_version == 1


@pytest.mark.parametrize("action", list(ExpiryAction))
def test_promise_7_a_ready_group_expires_when_the_trainer_has_moved_on(action: ExpiryAction) -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=1, expiry_action=action, selection=Selection.LIFO)
    it.submit(*(f"p{i}" for i in range(12)))
    epoch = it.rewind()
    it.put(it.lease())
    old = it.lease() or list(it.ledger.stream("train").groups.values())[:2]
    it.consume(epoch, 0)
    assert it.serve(epoch, 1) == 0
    it.put(it.lease())
    it.consume(epoch, 1)
    assert it.serve(epoch, 2) == 2
    expected = GroupState.QUEUED if action is ExpiryAction.REQUEUE else GroupState.DROPPED
    assert {it.states()[g.group_id] for g in old} == {expected}


@pytest.mark.parametrize(("interval", "max_staleness"), [(1, 0), (2, 1), (4, 3), (3, 5)])
def test_promise_7_a_run_goes_on_when_versions_skip_numbers(interval: int, max_staleness: int) -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=max_staleness)
    it.submit(*(f"p{i}" for i in range(40)))
    epoch = it.rewind()
    for step in range(12):
        it.put(it.lease())
        batch = it.consume(epoch, step)
        assert all(step - g.oldest_version <= max_staleness for g in batch.groups)
        if (step + 1) % interval == 0:
            it.serve(epoch, step + 1)


def test_promise_7_the_policy_version_goes_back_only_after_a_rewind(it: LedgerUnderTest) -> None:
    epoch = it.rewind()
    it.train_step(epoch, 0)
    with pytest.raises(FailedPrecondition, match="goes back only after Rewind"):
        it.ledger.set_policy_version(it.now, "train", epoch, 0)
    epoch = it.rewind(0)
    assert it.serve(epoch, 0) == 0


# 8. Bounded.


def test_promise_8_prompts_beyond_the_queue_are_refused_and_none_is_kept() -> None:
    it = LedgerUnderTest()
    it.create(max_queued_groups=3)
    it.submit("a", "b")
    with pytest.raises(ResourceExhausted, match="max_queued_groups 3") as refused:
        it.submit("c", "d")
    assert refused.value.retry_after_seconds > 0
    assert len(it.submit("a", "b", "c")) == 3


def test_promise_8_payloads_beyond_the_bytes_are_refused_and_producers_are_held() -> None:
    it = LedgerUnderTest()
    it.create(max_payload_bytes=160, max_staleness=None)
    it.submit("a", "b", "c")
    first, second, third = it.lease()
    it.put([first])
    with pytest.raises(ResourceExhausted, match="max_payload_bytes 160"):
        it.put([second, third])
    assert it.states()[second.group_id] is GroupState.LEASED


# 10. Prompts are walked once; the file's part is in test_prompts.


def test_promise_10_a_prompt_submitted_again_is_the_same_group_and_another_content_is_refused(
    it: LedgerUnderTest,
) -> None:
    from services.buffer.ledger.group import Prompt

    assert it.submit("p0", "p1", "p0") == ["train/0", "train/1", "train/0"]
    with pytest.raises(AlreadyExists, match="give it another prompt_id"):
        it.ledger.submit(it.now, "train", [Prompt("p0", b"something else")])


def test_a_request_to_retry_that_comes_again_takes_no_group_that_failed_since() -> None:
    it = LedgerUnderTest()
    it.create(max_attempts=1)
    it.submit("a", "b")
    first, second = it.lease()
    it.do(it.ledger.put(it.now, [without_samples(first, PutOutcome.FAILED)]))
    answer = it.do(it.ledger.retry(it.now, "train", "same", []))
    it.do(it.ledger.put(it.now, [without_samples(second, PutOutcome.FAILED)]))
    again = it.do(it.ledger.retry(it.now, "train", "same", []))
    assert (answer.num_groups, again.num_groups) == (1, 1)
    assert it.states()[second.group_id] is GroupState.FAILED


def test_a_group_that_is_retried_has_all_its_attempts_and_only_failed_ones_are() -> None:
    it = LedgerUnderTest()
    it.create(max_attempts=1)
    it.submit("a", "b")
    failed, leased = it.lease()
    it.do(it.ledger.put(it.now, [without_samples(failed, PutOutcome.FAILED)]))
    with pytest.raises(FailedPrecondition, match="is LEASED, only FAILED ones are tried again"):
        it.ledger.retry(it.now, "train", "request", [failed.group_id, leased.group_id])
    it.do(it.ledger.retry(it.now, "train", "request", [failed.group_id]))
    assert it.ledger.stream("train").groups[failed.group_id].attempts == 0
    (again,) = it.lease()
    assert (again.group_id, again.attempts, again.failure) == (failed.group_id, 1, None)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection.FIFO, ["a", "b"]),
        (Selection.LIFO, ["d", "c"]),
        (Selection.PRIORITY, ["c", "d"]),
        (Selection.FRESHEST, ["b", "a"]),
    ],
)
def test_selection_orders_the_batch(selection: Selection, expected: list[str]) -> None:
    it = LedgerUnderTest()
    it.create(selection=selection, max_staleness=9)
    it.submit("a", "b")
    it.submit("c", "d", priority=5)
    epoch = it.rewind()
    groups = {g.prompt.prompt_id: g for g in it.lease()}
    versions = {"a": 2, "b": 3, "c": 0, "d": 1}
    for name, group in groups.items():
        it.put([group], versions[name])
    assert [g.prompt.prompt_id for g in it.batch(epoch, 0).groups] == expected


def test_groups_are_listed_newest_change_first_page_by_page(it: LedgerUnderTest) -> None:
    it.put(it.lease())
    found, before = [], None
    while True:
        page, before = it.ledger.list_groups("train", (), before, 5)
        found += page
        if before is None:
            break
    assert len(found) == 12
    assert [g.position for g in found] == sorted((g.position for g in found), reverse=True)
    ready, _ = it.ledger.list_groups("train", [GroupState.READY], None, 100)
    assert [g.group_id for g in ready] == ["train/1", "train/0"]


def test_producers_get_groups_by_age_those_that_came_back_first_and_by_priority_when_asked() -> None:
    it = LedgerUnderTest()
    it.create(max_staleness=None, selection=Selection.PRIORITY)
    it.submit("a", "b", "c")
    it.submit("urgent", priority=1)
    urgent, a = it.lease(2)
    assert [urgent.prompt.prompt_id, a.prompt.prompt_id] == ["urgent", "a"]
    it.do(it.ledger.release(it.now, [Release(a.lease.lease_id)]))
    assert [g.prompt.prompt_id for g in it.lease()] == ["a", "b", "c"]


def test_a_put_of_weights_that_are_not_served_is_refused_and_may_come_again(it: LedgerUnderTest) -> None:
    (group, *_) = it.lease(1)
    ahead = complete(group, 1)
    put = GroupPut(
        ahead.lease_id, ahead.group_id, ahead.outcome, tuple(replace(s, newest_version=1) for s in ahead.samples)
    )
    with pytest.raises(InvalidArgument, match="version 1, version 0 is served"):
        it.ledger.put(it.now, [put])
    it.serve(it.rewind(), 1)
    assert [result.state for result in it.do(it.ledger.put(it.now, [put]))] == [GroupState.READY]


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (None, 1.0), (1.0, 1.0)])
def test_the_same_samples_with_another_reward_are_others(it: LedgerUnderTest, rewards: tuple[float, float]) -> None:
    (group, *_) = it.lease(1)
    first = rewarded(group, (0.5, 1.0))
    it.do(it.ledger.put(it.now, [first]))
    assert it.do(it.ledger.put(it.now, [first]))[0].duplicate
    with pytest.raises(AlreadyExists, match="another content"):
        it.ledger.put(it.now, [rewarded(group, rewards)])
