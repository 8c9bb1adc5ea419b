"""A run whose history has everything that a good one may have, in memory, so that a test can spoil a copy of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.state import LedgerEvent
from services.buffer.ledger.stream import StreamState
from services.buffer.store.memory import MemoryStore
from services.trainer.data.buffer import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.ledgers.buffer_samples import complete_put, failed_put, text_prompts
from tests.support.processes.buffer_server import served_buffer

STREAM = "train"


@dataclass
class OpenStore(MemoryStore):
    """A store whose rows a test may change."""

    streams: dict[str, StreamState] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    payloads: dict[str, bytes] = field(default_factory=dict)
    events: list[LedgerEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._streams, self._groups, self._payloads = self.streams, self.groups, self.payloads
        self._events = self.events

    def copied(self) -> OpenStore:
        """Rows are frozen: only the tables are copied."""
        return OpenStore(dict(self.streams), dict(self.groups), dict(self.payloads), list(self.events))

    def read_events(self, from_position: int, count: int) -> list[LedgerEvent]:
        return [event for event in self.events if event.position >= from_position][:count]

    def load(self) -> Any:
        snapshot = super().load()
        return type(snapshot)(
            snapshot.ledger_id, snapshot.streams, snapshot.groups, max((e.position for e in self.events), default=0)
        )


@dataclass
class AuditedRun:
    """What a run left: its ledger and its trainer's record."""

    store: OpenStore
    record: list[str]

    def copied(self) -> AuditedRun:
        return AuditedRun(self.store.copied(), list(self.record))

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.record]

    def set_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.record = [json.dumps(row) for row in rows]

    def events(self, kind: str) -> list[int]:
        """Where the events of a kind are; a stream's own where both have it."""
        return [i for i, event in enumerate(self.store.events) if event.kind == kind]

    def groups(self, state: GroupState) -> list[Group]:
        return [group for group in self.store.groups.values() if group.state is state]


async def good_run(folder: Path) -> AuditedRun:
    """Six steps under three trainers, the last step only fed; samples failed, groups dropped, expired, retried."""
    store, record_file = OpenStore(), folder / "trained.jsonl"
    async with served_buffer(store) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(
            pb.StreamConfig(name=STREAM, n_samples_per_prompt=2, groups_per_step=2, max_staleness=1, max_attempts=2)
        )
        await client.submit_prompts(STREAM, text_prompts(*(f"q{i}" for i in range(20))))
        trainer = FakeTrainer(client, TrainingRecord(record_file))
        await trainer.begin(0)
        await _mishaps(client)
        await trainer.step(put=2)
        await trainer.step(put=2)
        await client.commit(STREAM, trainer.epoch, 1)
        await trainer.step(put=2)
        await trainer.step(put=2, consumed=False)  # a kill between the record and the ledger
        await trainer.begin(1)
        await trainer.step()
        await trainer.step()
        await trainer.step()
        await client.commit(STREAM, trainer.epoch, 2)
        await _expire(client)
        await trainer.begin(4)
        await trainer.step(put=2)
        await trainer.step(put=2, consumed=False)
        leases = (await client.lease_groups(STREAM, "p", 1)).leases
        await client.put_groups([complete_put(lease) for lease in leases])
    return AuditedRun(store, record_file.read_text().splitlines())


async def run_with_drops(folder: Path) -> AuditedRun:
    """Groups dropped in every state, batches dissolved that were only given, only fed, or consumed and taken back.

    Steps 0 1 2 3 | 1 2 3, and step 4 fed under a batch that is dissolved then.
    """
    store, record_file = OpenStore(), folder / "trained.jsonl"
    async with served_buffer(store) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(
            pb.StreamConfig(name=STREAM, n_samples_per_prompt=2, groups_per_step=2, max_staleness=3, max_attempts=1)
        )
        await client.submit_prompts(STREAM, text_prompts(*(f"q{i}" for i in range(24))))
        trainer = FakeTrainer(client, TrainingRecord(record_file))
        await trainer.begin(0)
        failed, leased = (await client.lease_groups(STREAM, "p", 2)).leases
        await client.put_groups([failed_put(failed)])
        await client.drop_groups(STREAM, [failed.group_id, leased.group_id, f"{STREAM}/23"], "poison")
        await trainer.step(put=4)
        await trainer.step(put=2)
        await trainer.step(put=2)
        await trainer.step(put=2, consumed=False)
        await _drop_first_of(client, trainer, 3)  # it was fed, and the ledger had not heard of it
        await trainer.begin(1)
        await _drop_first_of(client, trainer, 2)  # it was consumed by the trainer before
        await trainer.step()
        await trainer.step()
        await trainer.step(put=4)
        await trainer.step(put=2, consumed=False)
        await _drop_first_of(client, trainer, 4)
    return AuditedRun(store, record_file.read_text().splitlines())


async def _drop_first_of(client: BufferClient, trainer: FakeTrainer, step: int) -> None:
    """Of a batch, which is dissolved."""
    groups = (await client.list_groups(STREAM, [pb.GROUP_STATE_READY])).groups
    members = sorted(group.group_id for group in groups if group.HasField("step") and group.step == step)
    done = await client.drop_groups(STREAM, members[:1], "poison")
    assert (done.num_groups, done.num_batches) == (1, 1)


@dataclass
class FakeTrainer:
    """Does to the ledger and the record what a trainer does."""

    client: BufferClient
    record: TrainingRecord
    epoch: int = 0
    at: int = 0

    async def begin(self, step: int) -> None:
        self.epoch, self.at = (await self.client.rewind(STREAM, step)).epoch, step

    async def step(self, put: int = 0, *, consumed: bool = True) -> None:
        """The next step, after `put` groups were produced for it."""
        leases = (await self.client.lease_groups(STREAM, "p", put)).leases if put else []
        puts = [complete_put(lease) for lease in leases]
        if puts:
            await self.client.put_groups(puts)
        reply = await self.client.lease_batch(STREAM, self.epoch, self.at, timeout_seconds=10)
        self.record.append(self.at, Batch.of(reply))
        if consumed:
            await self.client.consume(STREAM, self.epoch, self.at, reply.digest)
            self.at += 1
            await self.client.set_policy_version(STREAM, self.epoch, self.at)


async def _mishaps(client: BufferClient) -> None:
    """A release, a drop, failed attempts; a group that fails for good, is retried, and fails again."""
    first, second, third, fourth = (await client.lease_groups(STREAM, "p", 4)).leases
    dropped = pb.GroupPut(lease_id=second.lease_id, group_id=second.group_id, outcome=pb.PUT_OUTCOME_DROPPED)
    dropped.failure.reason = "FILTER"
    await client.release_leases([pb.LeaseRelease(lease_id=first.lease_id, reason="tired")])
    await client.put_groups([dropped, failed_put(third), failed_put(fourth)])
    await _fail(client, third.group_id)
    assert (await client.retry_groups(STREAM)).num_groups == 1
    await _fail(client, third.group_id)
    await _fail(client, third.group_id)


async def _fail(client: BufferClient, group_id: str) -> None:
    """One attempt of a group; what was leased beside it goes back."""
    leases = (await client.lease_groups(STREAM, "p", 4)).leases
    (leased,) = (lease for lease in leases if lease.group_id == group_id)
    await client.put_groups([failed_put(leased)])
    await client.release_leases([pb.LeaseRelease(lease_id=each.lease_id) for each in leases if each is not leased])


async def _expire(client: BufferClient) -> None:
    """A group whose tokens are too old the moment it is put."""
    (lease,) = (await client.lease_groups(STREAM, "p", 1)).leases
    (result,) = await client.put_groups([complete_put(lease, policy_version=0)])
    assert result.state == pb.GROUP_STATE_QUEUED
