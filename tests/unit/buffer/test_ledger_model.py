"""The ledger against a model of dictionaries: any order of commands, leases lost, restarts, rewinds."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.buffer.group import GroupState
from services.buffer.producing import PutOutcome
from tests.support.ledger_under_test import LedgerUnderTest, without_samples

GROUPS_PER_STEP = 2
MAX_STALENESS = 1


class LedgerModel(RuleBasedStateMachine):
    """`batches` is what each step was given; it must never change until the step is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.it = LedgerUnderTest()
        self.it.create(max_staleness=MAX_STALENESS, groups_per_step=GROUPS_PER_STEP)
        self.epoch = self.it.rewind()
        self.num_prompts = 0
        self.states: dict[str, GroupState] = {}
        self.batches: dict[int, list[str]] = {}
        self.step = 0
        self.committed = 0
        self.version = 0

    @rule(count=st.integers(1, 4))
    def submit(self, count: int) -> None:
        names = [f"p{self.num_prompts + i}" for i in range(count)]
        self.num_prompts += count
        for group_id in self.it.submit(*names):
            assert group_id not in self.states
            self.states[group_id] = GroupState.QUEUED

    @rule(count=st.integers(1, 5))
    def lease(self, count: int) -> None:
        held = list(self.states.values())
        admitted = self.step * GROUPS_PER_STEP + held.count(GroupState.LEASED) + held.count(GroupState.READY)
        limit = (MAX_STALENESS + min(self.step, self.version) + 1) * GROUPS_PER_STEP
        groups = self.it.lease(count)
        assert len(groups) == min(count, max(limit - admitted, 0), held.count(GroupState.QUEUED))
        for group in groups:
            assert self.states[group.group_id] is GroupState.QUEUED
            self.states[group.group_id] = GroupState.LEASED

    @rule(data=st.data(), outcome=st.sampled_from(["complete", "old", "dropped", "failed"]))
    def put(self, data: st.DataObject, outcome: str) -> None:
        leased = [g for g, state in self.states.items() if state is GroupState.LEASED]
        if not leased:
            return
        group = self.it.ledger.book("train").groups[data.draw(st.sampled_from(leased))]
        if outcome in ("complete", "old"):
            (result,) = self.it.put([group], self.version - 1 if outcome == "old" else None)
            assert result.state in (GroupState.READY, GroupState.QUEUED)
        else:
            put = without_samples(group, PutOutcome(outcome.upper()))
            (result,) = self.it.do(self.it.ledger.put(self.it.now, [put]))
            assert result.state is not GroupState.READY
        assert result.refused is None
        self.states[group.group_id] = result.state

    @rule()
    def lose_leases(self) -> None:
        self.it.seconds += 61
        self.it.do(self.it.ledger.expire_leases(self.it.now))
        for group_id, state in self.states.items():
            if state is GroupState.LEASED:
                self.states[group_id] = self.it.states()[group_id]
                assert self.states[group_id] in (GroupState.QUEUED, GroupState.FAILED)

    @rule()
    def consume(self) -> None:
        batch = self.it.batch(self.epoch, self.step)
        self._note_expired()
        if batch is None:
            assert self.step not in self.batches
            return
        ids = [g.group_id for g in batch.groups]
        assert len(set(ids)) == GROUPS_PER_STEP
        assert self.batches.setdefault(self.step, ids) == ids
        assert all(self.step - g.oldest_version <= MAX_STALENESS for g in batch.groups)
        self.it.do(self.it.ledger.consume(self.it.now, "train", self.epoch, self.step, batch.digest))
        self.states.update(dict.fromkeys(ids, GroupState.CONSUMED))
        self.step += 1

    @rule()
    def publish(self) -> None:
        self.it.serve(self.epoch, self.step)
        self.version = self.step
        self._note_expired()

    @precondition(lambda self: self.step > self.committed)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.committed, self.step))
        gone = [g for s in range(self.committed, step) for g in self.batches.pop(s)]
        assert self.it.commit(self.epoch, step) == len(gone)
        self.states.update(dict.fromkeys(gone, GroupState.COMMITTED))
        self.committed = step

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.committed, self.step))
        self.epoch = self.it.rewind(step)
        for back in range(step, self.step):
            self.states.update(dict.fromkeys(self.batches[back], GroupState.READY))
        self.step = step
        self.publish()

    @rule()
    def restart(self) -> None:
        self.it.restart()

    def _note_expired(self) -> None:
        for group_id, state in self.it.states().items():
            if self.states[group_id] is GroupState.READY and state is GroupState.QUEUED:
                self.states[group_id] = state

    @invariant()
    def states_agree(self) -> None:
        assert self.it.states() == self.states

    @invariant()
    def indexes_agree(self) -> None:
        book = self.it.ledger.book("train")
        held = list(self.states.values())
        assert {s: book.counts[s] for s in GroupState} == {s: held.count(s) for s in GroupState}
        assert len(book.queue) == held.count(GroupState.QUEUED)
        batched = {g for ids in self.batches.values() for g in ids}
        free = [g for g, s in self.states.items() if s is GroupState.READY and g not in batched]
        assert len(book.ready) == len(free)
        assert book.payload_bytes == sum(g.payload_bytes for g in book.groups.values())


LedgerModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLedgerModel = LedgerModel.TestCase
