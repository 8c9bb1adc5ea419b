"""A ledger under a fake clock: every transaction goes to a memory store, so a restart is a reload."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.api.sample.v1 import sample_pb2
from headrace.trajectory import Failure
from services.buffer.ledger.group import Group, GroupState, NewSample, Prompt, SampleRecord, payload_key
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.produce import GroupPut, PutOutcome, PutResult
from services.buffer.ledger.state import Instant
from services.buffer.ledger.stream import StreamConfig, StreamState
from services.buffer.ledger.train import StepBatch
from services.buffer.ledger.work import Result
from services.buffer.store.base import Store
from services.buffer.store.memory import MemoryStore

_Answer = TypeVar("_Answer")


@dataclass
class LedgerUnderTest:
    """`do` makes a command's transaction durable and gives its answer."""

    store: Store = field(default_factory=MemoryStore)
    seconds: float = 1000.0
    requests: int = 0
    retain_events: int | None = None

    def __post_init__(self) -> None:
        self.restart()

    @property
    def now(self) -> Instant:
        return Instant(self.seconds, 1_700_000_000.0 + self.seconds)

    def restart(self) -> None:
        snapshot = self.store.load()
        self.ledger = Ledger(snapshot.ledger_id, retain_events=self.retain_events)
        self.ledger.restore(
            self.now,
            snapshot.streams,
            snapshot.groups,
            snapshot.position,
            snapshot.oldest_position,
            lost_groups=snapshot.lost_groups,
        )
        assert not self.ledger.problems or self.store.damage(), self.ledger.problems

    def do(self, result: Result[_Answer]) -> _Answer:
        answer, transaction = result
        self.store.commit([transaction])
        return answer

    def create(self, name: str = "train", **changes: object) -> None:
        config = {"n_samples_per_prompt": 2, "groups_per_step": 2, "max_staleness": 0, **changes}
        self.do(self.ledger.create_stream(self.now, StreamState(StreamConfig(name=name, **config))))  # type: ignore[arg-type]

    def submit(self, *names: str, priority: int = 0) -> list[str]:
        prompts = [Prompt(name, f"What is {name}?".encode(), priority) for name in names]
        return self.do(self.ledger.submit(self.now, "train", prompts))

    def lease(self, count: int = 100) -> list[Group]:
        self.requests += 1
        return self.do(self.ledger.lease(self.now, "train", "producer", f"request-{self.requests}", count))

    def put(self, groups: Sequence[Group], policy_version: int | None = None) -> list[PutResult]:
        return self.do(self.ledger.put(self.now, [complete(group, policy_version) for group in groups]))

    def rewind(self, step: int = 0, request_id: str | None = None) -> int:
        self.requests += 1
        return self.do(self.ledger.rewind(self.now, "train", step, request_id or f"rewind-{self.requests}"))[0]

    def batch(self, epoch: int, step: int) -> StepBatch | None:
        return self.do(self.ledger.lease_batch(self.now, "train", epoch, step))

    def consume(self, epoch: int, step: int) -> StepBatch:
        batch = self.batch(epoch, step)
        assert batch is not None, f"step {step} has no batch"
        self.do(self.ledger.consume(self.now, "train", epoch, step, batch.digest))
        return batch

    def commit(self, epoch: int, step: int) -> int:
        return self.do(self.ledger.commit(self.now, "train", epoch, step))

    def serve(self, epoch: int, policy_version: int) -> int:
        return self.do(self.ledger.set_policy_version(self.now, "train", epoch, policy_version))

    def train_step(self, epoch: int, step: int) -> StepBatch:
        """Produce what may be produced, consume it, publish."""
        self.put(self.lease())
        batch = self.consume(epoch, step)
        self.serve(epoch, step + 1)
        return batch

    def states(self) -> dict[str, GroupState]:
        return {group_id: group.state for group_id, group in self.ledger.stream("train").groups.items()}


def sample(
    group: Group,
    index: int,
    policy_version: int,
    *,
    text: str = "",
    sample_id: str | None = None,
    reward: float | None = None,
) -> NewSample:
    """A payload of its own for every sample and version."""
    assert group.lease is not None
    payload = f"{group.lease.lease_id} {index} v{policy_version} {text}".encode()
    name = sample_id or f"{group.lease.lease_id}/{index}"
    digest = hashlib.sha256(payload).digest()
    record = SampleRecord(
        payload_key(group.lease.lease_id, index),
        name,
        index,
        digest,
        len(payload),
        policy_version,
        sample_pb2.SampleEnvelope(sample_id=name, digest=digest, reward=reward).SerializeToString(),
        reward,
    )
    return NewSample(record, payload)


def complete(group: Group, policy_version: int | None = None, *, text: str = "") -> GroupPut:
    """The put of a whole group of two."""
    assert group.lease is not None
    version = group.lease.policy_version if policy_version is None else policy_version
    samples = tuple(sample(group, i, version, text=text) for i in range(2))
    return GroupPut(group.lease.lease_id, group.group_id, PutOutcome.COMPLETE, samples)


def rewarded(group: Group, rewards: Sequence[float | None]) -> GroupPut:
    """The put of a group that was judged so."""
    assert group.lease is not None
    version = group.lease.policy_version
    samples = tuple(sample(group, i, version, reward=reward) for i, reward in enumerate(rewards))
    return GroupPut(group.lease.lease_id, group.group_id, PutOutcome.COMPLETE, samples)


def without_samples(group: Group, outcome: PutOutcome, reason: str = "BECAUSE") -> GroupPut:
    """The put of a dropped or failed group."""
    assert group.lease is not None
    return GroupPut(group.lease.lease_id, group.group_id, outcome, failure=Failure(reason, "for the test"))
