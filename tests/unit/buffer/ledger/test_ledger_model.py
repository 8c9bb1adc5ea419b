"""The ledger against a model of dictionaries, on every store, under a fake clock: any order of commands, any policy.

Leases renewed and lost, partial groups, filters, failures, expiry, prefetched batches, rewinds, retention, restarts.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import NotFound
from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.operate import Dropped
from services.buffer.ledger.produce import GroupPut, PutOutcome, Release
from services.buffer.ledger.stream import ExpiryAction, Selection
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, sample, without_samples
from tests.support.ledgers.stores import STORES, reopened

GROUPS_PER_STEP = 2
LEASE_SECONDS = 60.0
MAX_ATTEMPTS = 2
DROPPABLE = (GroupState.QUEUED, GroupState.LEASED, GroupState.READY, GroupState.FAILED)
REWARDS = (0.0, 0.25, 0.5, 1.0)


@dataclass
class ModelGroup:
    """What the model knows of one."""

    seq: int
    priority: int
    state: GroupState = GroupState.QUEUED
    attempts: int = 0
    admitted: int = 0
    deadline: float = 0.0
    version: int = 0
    rewards: tuple[float, ...] = ()
    num_partials: int = 0
    ended_step: int | None = None


@dataclass
class Model:
    """`batches` is what each step was given; it must never change until the step is committed."""

    groups: dict[str, ModelGroup] = field(default_factory=dict)
    batches: dict[int, list[str]] = field(default_factory=dict)
    forgotten: int = 0
    step: int = 0
    committed: int = 0
    version: int = 0
    leases: int = 0

    def of(self, state: GroupState) -> list[str]:
        return [group_id for group_id, group in self.groups.items() if group.state is state]

    def free(self) -> list[str]:
        """READY groups that no batch has."""
        batched = {group_id for ids in self.batches.values() for group_id in ids}
        return [group_id for group_id in self.of(GroupState.READY) if group_id not in batched]


class LedgerModel(RuleBasedStateMachine):
    kind: ClassVar[str] = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.folder = tempfile.TemporaryDirectory()
        self.it = LedgerUnderTest(STORES[self.kind](Path(self.folder.name)))

    def teardown(self) -> None:
        self.it.store.close()
        self.folder.cleanup()

    @initialize(
        max_staleness=st.sampled_from([0, 1, 2, None]),
        selection=st.sampled_from([s for s in Selection if s is not Selection.HOOK]),
        expiry_action=st.sampled_from(ExpiryAction),
        over_sampling=st.sampled_from([0, 3]),
        retain_steps=st.sampled_from([None, 0, 1]),
        num_prompts=st.integers(2, 12),
    )
    def create(
        self,
        max_staleness: int | None,
        selection: Selection,
        expiry_action: ExpiryAction,
        over_sampling: int,
        retain_steps: int | None,
        num_prompts: int,
    ) -> None:
        self.max_staleness, self.selection, self.expiry_action = max_staleness, selection, expiry_action
        self.over_sampling, self.retain_steps = over_sampling, retain_steps
        self.it.create(
            max_staleness=max_staleness,
            groups_per_step=GROUPS_PER_STEP,
            selection=selection,
            expiry_action=expiry_action,
            over_sampling_groups=over_sampling,
            retain_steps=retain_steps,
            max_attempts=MAX_ATTEMPTS,
            lease_seconds=LEASE_SECONDS,
        )
        self.epoch = self.it.rewind()
        self.submit(num_prompts, 0)

    # Producers

    @rule(count=st.integers(1, 6), priority=st.integers(-1, 1))
    def submit(self, count: int, priority: int) -> None:
        first = len(self.model.groups) + self.model.forgotten
        names = [f"p{first + i}" for i in range(count)]
        for i, group_id in enumerate(self.it.submit(*names, priority=priority)):
            assert group_id not in self.model.groups
            self.model.groups[group_id] = ModelGroup(first + i, priority)

    @rule(count=st.integers(1, 8))
    def lease(self, count: int) -> None:
        model = self.model
        by_priority = self.selection is Selection.PRIORITY
        queued = sorted(
            model.of(GroupState.QUEUED),
            key=lambda g: (-model.groups[g].priority if by_priority else 0, model.groups[g].seq),
        )
        places = self.places()
        groups = self.it.lease(count)
        assert [g.group_id for g in groups] == queued[: count if places is None else min(count, places)]
        for given in groups:
            group = model.groups[given.group_id]
            assert len(given.partials) == group.num_partials
            model.leases += 1
            group.state, group.admitted = GroupState.LEASED, model.leases
            group.attempts, group.deadline = group.attempts + 1, self.it.seconds + LEASE_SECONDS

    def places(self) -> int | None:
        if self.max_staleness is None:
            return None
        model = self.model
        admitted = model.step * GROUPS_PER_STEP + len(model.of(GroupState.LEASED)) + len(model.of(GroupState.READY))
        last_step = self.max_staleness + min(model.step, model.version)
        has_use = any(step not in model.batches for step in range(model.step, last_step + 1))
        return max((last_step + 1) * GROUPS_PER_STEP + has_use * self.over_sampling - admitted, 0)

    @rule(data=st.data(), outcome=st.sampled_from(["complete", "old", "dropped", "failed"]))
    def put_one(self, data: st.DataObject, outcome: str) -> None:
        group_id = self.draw_leased(data)
        if group_id is not None:
            self.put(data, group_id, outcome)

    @rule(data=st.data(), count=st.integers(2, 8))
    def produce(self, data: st.DataObject, count: int) -> None:
        self.lease(count)
        for group_id in self.model.of(GroupState.LEASED):
            self.put(data, group_id, data.draw(st.sampled_from(["complete", "complete", "old"])))

    def put(self, data: st.DataObject, group_id: str, outcome: str) -> None:
        given, group = self.held(group_id), self.model.groups[group_id]
        if outcome in ("complete", "old"):
            version = self.model.version - (outcome == "old")
            rewards = tuple(data.draw(st.sampled_from(REWARDS)) for _ in range(2))
            samples = tuple(sample(given, i, version, reward=reward) for i, reward in enumerate(rewards))
            put = GroupPut(given.lease.lease_id, group_id, PutOutcome.COMPLETE, samples)
            group.state, group.version, group.rewards = GroupState.READY, version, rewards
            self.expire([group_id], self.model.step)
        else:
            put = without_samples(given, PutOutcome(outcome.upper()))
            if outcome == "dropped":
                group.state, group.ended_step = GroupState.DROPPED, self.model.step
            else:
                self.fail(group)
        if group.state is not GroupState.QUEUED or outcome in ("complete", "old"):
            group.num_partials = 0
        (result,) = self.it.do(self.it.ledger.put(self.it.now, [put]))
        assert (result.refused, result.duplicate, result.state) == (None, False, group.state)
        (again,) = self.it.do(self.it.ledger.put(self.it.now, [put]))
        assert (again.duplicate, again.state) == (True, group.state)

    @rule(data=st.data(), count=st.integers(0, 2))
    def release(self, data: st.DataObject, count: int) -> None:
        group_id = self.draw_leased(data)
        if group_id is None:
            return
        given, group = self.held(group_id), self.model.groups[group_id]
        name = given.lease.lease_id
        partials = tuple(sample(given, i, 0, sample_id=f"partial {name}/{i}") for i in range(count))
        self.it.do(self.it.ledger.release(self.it.now, [Release(name, partials, "because")]))
        group.state, group.attempts = GroupState.QUEUED, group.attempts - 1
        group.num_partials = count or group.num_partials

    @rule(data=st.data(), seconds=st.sampled_from([1.0, 25.0, 61.0]))
    def time_passes(self, data: st.DataObject, seconds: float) -> None:
        leased = self.model.of(GroupState.LEASED)
        renewed = data.draw(st.lists(st.sampled_from(leased), unique=True)) if leased else []
        self.it.ledger.renew(self.it.now, [self.held(group_id).lease.lease_id for group_id in renewed])
        for group_id in renewed:
            self.model.groups[group_id].deadline = self.it.seconds + LEASE_SECONDS
        self.it.seconds += seconds
        due = [g for g in leased if self.model.groups[g].deadline <= self.it.seconds]
        assert self.it.do(self.it.ledger.expire_leases(self.it.now)) == len(due)
        for group_id in due:
            self.fail(self.model.groups[group_id])

    @precondition(lambda self: self.model.of(GroupState.FAILED))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        failed = self.model.of(GroupState.FAILED)
        chosen = data.draw(st.lists(st.sampled_from(failed), unique=True))
        again = chosen or failed
        self.it.requests += 1
        name = f"retry-{self.it.requests}"
        answer = self.it.do(self.it.ledger.retry(self.it.now, "train", name, chosen))
        assert (answer.num_groups, answer.num_failed) == (len(again), len(failed) - len(again))
        for group_id in again:
            self.model.groups[group_id].state, self.model.groups[group_id].attempts = GroupState.QUEUED, 0
        assert self.it.do(self.it.ledger.retry(self.it.now, "train", name, chosen)) == answer

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """An operator's; batches that have one of the groups are dissolved."""
        model = self.model
        droppable = [group_id for state in DROPPABLE for group_id in model.of(state)]
        if not droppable:
            return
        chosen = data.draw(st.lists(st.sampled_from(droppable), min_size=1, max_size=3, unique=True))
        dissolved = [step for step, ids in model.batches.items() if not set(ids).isdisjoint(chosen)]
        records = [record for group_id in chosen for record in self.held(group_id).records]
        self.it.requests += 1
        name = f"drop-{self.it.requests}"
        for _ in range(2):
            answer = self.it.do(self.it.ledger.drop(self.it.now, "train", name, chosen, "poison"))
            assert answer == Dropped(len(chosen), len(dissolved))
        for group in (model.groups[group_id] for group_id in chosen):
            group.state, group.ended_step, group.num_partials = GroupState.DROPPED, model.step, 0
        for step in dissolved:
            del model.batches[step]
        for record in records[:2]:
            self.assert_gone(record)

    # The trainer

    @rule()
    def consume(self) -> None:
        self.train_next()

    @rule(data=st.data())
    def whole_step(self, data: st.DataObject) -> None:
        self.submit(2, 0)
        self.produce(data, 4)
        self.train_next()
        self.publish()

    def train_next(self) -> None:
        batch = self.lease_batch(self.model.step)
        if batch is None:
            return
        digest = self.it.batch(self.epoch, self.model.step).digest
        self.it.do(self.it.ledger.consume(self.it.now, "train", self.epoch, self.model.step, digest))
        for group_id in batch:
            self.model.groups[group_id].state = GroupState.CONSUMED
        self.model.step += 1

    @precondition(lambda self: self.model.step in self.model.batches)
    @rule()
    def prefetch(self) -> None:
        self.lease_batch(self.model.step + 1)

    def lease_batch(self, step: int) -> list[str] | None:
        model, is_ahead = self.model, step > self.model.step
        if step not in model.batches and not (is_ahead and self.max_staleness == 0):
            self.expire(model.free(), step)
            free = sorted(model.free(), key=lambda group_id: self.rank(model.groups[group_id]))
            if len(free) >= GROUPS_PER_STEP:
                model.batches[step] = free[:GROUPS_PER_STEP]
        expected = model.batches.get(step)
        batch = self.it.batch(self.epoch, step)
        assert (batch and [g.group_id for g in batch.groups]) == expected
        if batch and self.max_staleness is not None:
            assert all(step - g.oldest_version <= self.max_staleness for g in batch.groups)
        return expected

    def rank(self, group: ModelGroup) -> tuple[float, float]:
        mean = sum(group.rewards) / 2
        first = {
            Selection.FIFO: 0,
            Selection.LIFO: -group.admitted,
            Selection.PRIORITY: -group.priority,
            Selection.FRESHEST: -group.version,
            Selection.REWARD: -mean,
            Selection.SURPRISE: -sum(abs(reward - mean) for reward in group.rewards) / 2,
        }
        return first[self.selection], group.admitted

    @rule()
    def publish(self) -> None:
        self.it.serve(self.epoch, self.model.step)
        self.model.version = self.model.step
        self.expire(self.model.free(), self.model.step)

    @precondition(lambda self: self.model.step > self.model.committed)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        model = self.model
        step = data.draw(st.integers(model.committed, model.step))
        gone = {g: s for s in range(model.committed, step) for g in model.batches.pop(s)}
        records = [r for group_id in gone for r in self.held(group_id).samples]
        assert self.it.commit(self.epoch, step) == len(gone)
        for group_id, its_step in gone.items():
            model.groups[group_id].state, model.groups[group_id].ended_step = GroupState.COMMITTED, its_step
        model.committed = step
        if self.retain_steps is not None:
            end = step - self.retain_steps
            old = [g for g, group in model.groups.items() if group.ended_step is not None and group.ended_step < end]
            model.forgotten += len(old)
            for group_id in old:
                del model.groups[group_id]
        for record in records[:2]:
            self.assert_gone(record)

    def assert_gone(self, record: object) -> None:
        try:
            self.it.store.read_payloads([record])
        except NotFound:
            return
        raise AssertionError(f"the payload of {record} is still there")

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        model = self.model
        step = data.draw(st.integers(model.committed, model.step))
        self.epoch = self.it.rewind(step)
        for back in range(step, model.step):
            for group_id in model.batches[back]:
                model.groups[group_id].state = GroupState.READY
        model.step = step
        self.publish()

    @rule()
    def restart(self) -> None:
        self.it.store = reopened(self.kind, self.it.store, Path(self.folder.name))
        self.it.restart()
        for group_id in self.model.of(GroupState.LEASED):
            self.model.groups[group_id].deadline = self.it.seconds + LEASE_SECONDS

    # What both sides know

    def held(self, group_id: str) -> Group:
        return self.it.ledger.stream("train").groups[group_id]

    def draw_leased(self, data: st.DataObject) -> str | None:
        leased = self.model.of(GroupState.LEASED)
        return data.draw(st.sampled_from(leased)) if leased else None

    def fail(self, group: ModelGroup) -> None:
        failed = group.attempts >= MAX_ATTEMPTS
        group.state = GroupState.FAILED if failed else GroupState.QUEUED
        group.num_partials = 0 if failed else group.num_partials

    def expire(self, group_ids: list[str], step: int) -> None:
        """Those that may not be trained at `step` any more."""
        for group in (self.model.groups[group_id] for group_id in group_ids):
            if self.max_staleness is None or step - group.version <= self.max_staleness:
                continue
            if self.expiry_action is ExpiryAction.DROP:
                group.state, group.ended_step = GroupState.DROPPED, self.model.step
            else:
                group.state, group.attempts = GroupState.QUEUED, group.attempts - 1

    @invariant()
    def states_agree(self) -> None:
        if self.it.ledger.streams:
            assert self.it.states() == {group_id: group.state for group_id, group in self.model.groups.items()}

    @invariant()
    def indexes_agree(self) -> None:
        if not self.it.ledger.streams:
            return
        stream, model = self.it.ledger.stream("train"), self.model
        assert {s: stream.counts[s] for s in GroupState} == {s: len(model.of(s)) for s in GroupState}
        assert sum(stream.count(s) for s in GroupState) == len(model.groups) + model.forgotten
        assert stream.queues.num_queued == len(model.of(GroupState.QUEUED))
        assert stream.queues.num_ready == len(model.free())
        assert stream.payload_bytes == sum(g.payload_bytes for g in stream.groups.values())
        assert set(stream.samples) == {r.sample_id for g in stream.groups.values() for r in g.samples}

    @invariant()
    def payloads_are_there(self) -> None:
        if self.it.ledger.streams and self.it.ledger.position % 5 == 0:
            self.it.store.read_payloads([r for g in self.it.ledger.stream("train").groups.values() for r in g.records])


def _case(store: str, max_examples: int) -> type:
    machine: type[LedgerModel] = type(f"LedgerOn{store.title().replace(' ', '')}", (LedgerModel,), {"kind": store})
    case = machine.TestCase
    case.settings = settings(
        max_examples=max_examples,
        stateful_step_count=30,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return case


globals().update(
    {f"TestOn{name.title().replace(' ', '')}": _case(name, 200 if name == "memory" else 8) for name in STORES}
)
