"""Selection, limiter, over-sampling and retention: which groups go where, and when they are forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.errors import InvalidArgument, NotFound, ResourceExhausted
from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.limiter import Limiter
from services.buffer.ledger.produce import NoLeaseReason, PutOutcome
from services.buffer.ledger.stream import Selection, StreamConfig, check_config
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, rewarded, without_samples


@pytest.fixture
def it() -> LedgerUnderTest:
    return LedgerUnderTest()


@pytest.mark.parametrize(
    ("selection", "expected"),
    [(Selection.REWARD, ["b", "c", "d", "a", "e"]), (Selection.SURPRISE, ["d", "c", "a", "b", "e"])],
)
def test_a_batch_begins_with_the_highest_reward_or_the_largest_spread(
    it: LedgerUnderTest, selection: Selection, expected: list[str]
) -> None:
    it.create(max_staleness=None, groups_per_step=5, selection=selection)
    it.submit("a", "b", "c", "d", "e")
    rewards = {"a": (0.0, 0.0), "b": (1.0, 1.0), "c": (0.4, 1.0), "d": (0.0, 1.0), "e": (None, None)}
    groups = it.lease()
    it.do(it.ledger.put(it.now, [rewarded(group, rewards[group.prompt.prompt_id]) for group in groups]))
    epoch = it.rewind()
    batch = it.batch(epoch, 0)
    assert batch is not None
    assert [group.prompt.prompt_id for group in batch.groups] == expected


def test_the_limiter_waits_for_its_minimum_size(it: LedgerUnderTest) -> None:
    it.create(max_staleness=None, groups_per_step=2, limiter=Limiter(min_size=5))
    it.submit(*"abcdef")
    epoch = it.rewind()
    groups = it.lease()
    it.put(groups[:4])
    assert it.batch(epoch, 0) is None
    it.put(groups[4:5])
    assert it.batch(epoch, 0) is not None


def test_the_limiter_keeps_producers_and_trainer_within_its_window(it: LedgerUnderTest) -> None:
    """Of 100 prompts, half are to be trained; the difference stays within 4 of 0.5 x 6."""
    it.create(
        max_staleness=None,
        groups_per_step=2,
        limiter=Limiter(min_size=6, samples_per_insert=0.5, error_buffer=4.0),
    )
    it.submit(*(f"p{i}" for i in range(100)))
    epoch, step, made = it.rewind(), 0, 0
    while made < 100:
        groups = it.lease(3)
        if not groups:
            assert it.ledger.no_lease_reason("train") is NoLeaseReason.LIMITER
        it.put(groups)
        made += len(groups)
        assert 0.5 * made - 2 * step <= 3 + 4
        while it.batch(epoch, step) is not None:
            it.consume(epoch, step)
            step += 1
            assert 0.5 * made - 2 * step >= 3 - 4
    assert 2 * step == pytest.approx(50, abs=4)


@pytest.mark.parametrize(
    ("limiter", "complaint"),
    [
        (Limiter(min_size=0), "min_size_to_sample is 0"),
        (Limiter(samples_per_insert=0.5), "belong together"),
        (Limiter(samples_per_insert=1.5, error_buffer=9.0), "at most 1"),
        (Limiter(samples_per_insert=1.0, error_buffer=1.0), "smaller than 1.5"),
    ],
)
def test_a_limiter_that_cannot_be_is_refused(limiter: Limiter, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        check_config(StreamConfig("train", n_samples_per_prompt=2, groups_per_step=2, limiter=limiter))


def test_over_sampling_fills_a_step_in_spite_of_drops_and_the_surplus_is_made_anew(it: LedgerUnderTest) -> None:
    it.create(max_staleness=0, groups_per_step=2, over_sampling_groups=2)
    it.submit(*"abcdef")
    epoch = it.rewind()
    groups = it.lease()
    assert [g.prompt.prompt_id for g in groups] == ["a", "b", "c", "d"]
    it.do(it.ledger.put(it.now, [without_samples(groups[0], PutOutcome.DROPPED, "FILTERED")]))
    it.put(groups[1:])
    assert [g.prompt.prompt_id for g in it.consume(epoch, 0).groups] == ["b", "c"]
    it.serve(epoch, 1)
    assert [g.prompt.prompt_id for g in it.lease()] == ["d", "e", "f"]


def test_no_surplus_is_begun_once_the_last_step_that_it_could_be_trained_at_has_its_batch(it: LedgerUnderTest) -> None:
    """It would only expire, while it holds up engines and, on a machine that they share, the trainer."""
    it.create(max_staleness=0, groups_per_step=2, over_sampling_groups=2)
    it.submit(*"abcdefgh")
    epoch = it.rewind()
    groups = it.lease()
    it.put(groups[:2])
    assert it.batch(epoch, 0)
    it.do(it.ledger.put(it.now, [without_samples(group, PutOutcome.DROPPED, "FILTERED") for group in groups[2:]]))
    assert it.lease() == []
    it.consume(epoch, 0)
    assert it.lease() == []  # these weights are a step too old by now
    it.commit(epoch, 1)
    assert it.lease() == []
    it.serve(epoch, 1)
    assert len(it.lease()) == 4


def test_a_surplus_is_begun_while_a_step_that_it_could_be_trained_at_has_no_batch(it: LedgerUnderTest) -> None:
    it.create(max_staleness=1, groups_per_step=2, over_sampling_groups=2)
    it.submit(*"abcdefghij")
    epoch = it.rewind()
    groups = it.lease()
    assert len(groups) == 6
    it.put(groups[:4])
    assert it.batch(epoch, 0)
    it.do(it.ledger.put(it.now, [without_samples(groups[4], PutOutcome.DROPPED, "FILTERED")]))
    (replaced,) = it.lease()  # it may be trained at step 1
    assert it.batch(epoch, 1)
    it.do(it.ledger.put(it.now, [without_samples(replaced, PutOutcome.DROPPED, "FILTERED")]))
    assert it.lease() == []


def test_versions_that_only_steps_with_a_batch_could_train_are_not_wanted(it: LedgerUnderTest) -> None:
    it.create(max_staleness=1, groups_per_step=2, over_sampling_groups=2)
    it.submit(*"abcdefghij")
    epoch = it.rewind()
    wanted = it.ledger.stream("train").oldest_wanted
    it.put(it.lease())
    assert wanted() == 0
    assert it.batch(epoch, 0)
    assert wanted() == 0  # step 1 may be trained with version 0
    assert it.batch(epoch, 1)
    assert wanted() == 1
    it.consume(epoch, 0)
    assert wanted() == 1
    it.serve(epoch, 1)
    it.put(it.lease())
    assert it.batch(epoch, 2)
    assert wanted() == 2


def trained(it: LedgerUnderTest, steps: int, **config: Any) -> int:
    """An epoch with so many steps of two groups consumed, of each a third was dropped."""
    it.create(max_staleness=0, **config)
    it.submit(*(f"p{i}" for i in range(3 * steps)))
    epoch = it.rewind()
    for step in range(steps):
        (dropped,) = it.lease(1)
        it.do(it.ledger.put(it.now, [without_samples(dropped, PutOutcome.DROPPED)]))
        it.train_step(epoch, step)
    return epoch


def test_ended_groups_are_forgotten_after_their_steps_and_stay_counted(it: LedgerUnderTest) -> None:
    epoch = trained(it, 10, retain_steps=2)
    stream = it.ledger.stream("train")
    assert it.commit(epoch, 9) == 18
    assert len(stream.groups) == 3 * 10 - 3 * 7
    assert (stream.count(GroupState.COMMITTED), stream.count(GroupState.DROPPED)) == (18, 10)
    assert stream.state.forgotten == {"COMMITTED": 14, "DROPPED": 7}
    (event,) = [e for e in it.store.read_events(1, 10_000) if e.kind == "forgotten"]
    assert (event.step, stream.state.forgotten_step) == (7, 7)
    before = it.states()
    it.restart()
    assert it.states() == before
    stream = it.ledger.stream("train")
    assert (stream.count(GroupState.COMMITTED), len(stream.prompts), len(stream.samples)) == (18, 9, 12)
    assert it.commit(epoch, 10) == 2
    assert stream.state.forgotten_step == 8


def test_a_put_that_is_made_again_after_its_group_was_forgotten_is_refused_and_the_rest_is_kept(
    it: LedgerUnderTest,
) -> None:
    it.create(max_staleness=None, retain_steps=0)
    it.submit("a", "b", "c")
    epoch, groups, late = it.rewind(), it.lease(2), it.lease(1)
    it.put(groups)
    it.consume(epoch, 0)
    it.commit(epoch, 1)
    again, other, kept = it.put([*groups, *late])
    assert [result.refused.reason for result in (again, other)] == ["LEASE_LOST", "LEASE_LOST"]
    assert "no longer leased" in again.refused.message
    assert [result.state for result in (again, other, kept)] == [None, None, GroupState.READY]
    assert it.states() == {"train/2": GroupState.READY}


@pytest.mark.parametrize("group_id", ["train/3", "train/-1", "train/00", "train/x", "train/"])
def test_a_put_for_a_group_that_never_was_is_not_found(it: LedgerUnderTest, group_id: str) -> None:
    it.create(max_staleness=None)
    it.submit("a", "b", "c")
    (group,) = it.lease(1)
    with pytest.raises(NotFound, match=f"never had a group {group_id}"):
        it.do(it.ledger.put(it.now, [replace(without_samples(group, PutOutcome.FAILED), group_id=group_id)]))


def test_a_put_for_a_group_of_another_shard_is_not_found(it: LedgerUnderTest) -> None:
    it.create(max_staleness=None, shard=1, num_shards=2)
    it.submit("a", "b")
    first, _ = it.lease(2)
    assert list(it.states()) == ["train/1", "train/3"]
    with pytest.raises(NotFound, match="never had a group train/2"):
        it.do(it.ledger.put(it.now, [replace(without_samples(first, PutOutcome.FAILED), group_id="train/2")]))


def held(it: LedgerUnderTest) -> list[Group]:
    return list(it.ledger.stream("train").groups.values())


def test_groups_and_leases_have_limits_that_say_which(it: LedgerUnderTest) -> None:
    it.create(max_staleness=None, max_groups=3, max_leases=2)
    with pytest.raises(ResourceExhausted, match="max_groups 3"):
        it.submit(*"abcd")
    assert held(it) == []
    it.submit(*"abc")
    assert len(it.lease()) == 2
    with pytest.raises(ResourceExhausted, match="max_leases"):
        it.lease()
