"""Every RPC of the buffer over a network that cuts, half-closes and swallows.

Each case prepares a stream of its own, makes its call through a faulty network under a deadline, and makes it again,
with the same keys, once the network is well. The answer is then that of any other time that it is made, and the ledger
that of a twin of the stream on which it was made once, over a network that is well.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1.sample_pb2 import OutOfLineColumn
from headrace.client.buffer import BufferClient, LargeColumn
from headrace.errors import DeadlineExceeded, Unavailable
from services.buffer.store.sqlite import SqliteStore
from tests.support.faults.fault_proxy import Direction, Fault, fault_proxy
from tests.support.ledgers.buffer_samples import complete_put, failed_put, text_prompts
from tests.support.processes.buffer_server import served_buffer

SERVICE = pb.DESCRIPTOR.services_by_name["BufferService"]
DEADLINE_SECONDS = 0.6
COLUMN = LargeColumn(sha256(b"column" * 1000).digest(), b"column" * 1000)
NAMED = OutOfLineColumn(name="column", sha256=COLUMN.sha256, num_bytes=len(COLUMN.data))
PROMPTS = ("a", "b", "c", "d")


@dataclass
class Scene:
    """A stream with two steps' worth of prompts, and a client whose network is well."""

    client: BufferClient
    stream: str
    epoch: int = 0
    leases: list[pb.GroupLease] = field(default_factory=list)
    batch: pb.LeaseBatchResponse = field(default_factory=pb.LeaseBatchResponse)

    @property
    def config(self) -> pb.StreamConfig:
        return pb.StreamConfig(name=self.stream, n_samples_per_prompt=2, groups_per_step=2, max_staleness=1)

    async def created(self) -> None:
        await self.client.create_stream(self.config)

    async def submitted(self) -> None:
        await self.created()
        await self.client.submit_prompts(self.stream, text_prompts(*PROMPTS))

    async def leased(self) -> None:
        await self.submitted()
        self.leases = list((await self.client.lease_groups(self.stream, "p", 2)).leases)

    async def failed(self) -> None:
        """All of their attempts."""
        await self.submitted()
        for _ in range(3):
            self.leases = list((await self.client.lease_groups(self.stream, "p", 2)).leases)
            await self.client.put_groups([failed_put(lease) for lease in self.leases])

    async def put(self) -> None:
        await self.leased()
        await self.client.put_groups([complete_put(lease) for lease in self.leases])
        self.epoch = (await self.client.rewind(self.stream, 0)).epoch

    async def batched(self) -> None:
        await self.put()
        self.batch = await self.client.try_lease_batch(self.stream, self.epoch, 0)

    async def consumed(self) -> None:
        await self.batched()
        await self.client.consume(self.stream, self.epoch, 0, self.batch.digest)

    @property
    def sample_ids(self) -> list[str]:
        return [sample.sample_id for group in self.batch.groups for sample in group.samples]

    async def events(self, client: BufferClient, deadline_seconds: float | None = None) -> list[Any]:
        """The stream's whole history so far."""
        end = max((group.position for group in (await self.client.list_groups(self.stream)).groups), default=0)
        found: list[pb.LedgerEvent] = []
        async for event in client.watch(self.stream, deadline_seconds=deadline_seconds) if end else _nothing():
            found.append(event)
            if event.position >= end:
                break
        return found

    async def ledger(self) -> object:
        """How often each kind of event has happened to a group, and what there is; None where there is no stream."""
        if self.stream not in [config.name for config in await self.client.list_streams()]:
            return None
        kinds = Counter(event.kind for event in await self.events(self.client) if event.group_id)
        stats = await self.client.stats(self.stream)
        groups = {name: count for name, count in stats.groups.items() if count}
        return kinds, groups, stats.epoch - self.epoch, stats.committed_step, stats.policy_version


async def _nothing() -> AsyncIterator[pb.LedgerEvent]:
    return
    yield


@dataclass(frozen=True)
class Case:
    """`call` is made through the faulty network, and again."""

    prepare: Callable[[Scene], Awaitable[None]]
    call: Callable[[Scene, BufferClient], Awaitable[Any]]


async def uploaded(scene: Scene) -> None:
    await scene.client.upload_column(COLUMN)


async def backed_up(client: BufferClient) -> set[str]:
    """Whether the copy is whole; its files' names."""
    *chunks, last = [part async for part in client.backup(deadline_seconds=client._deadline_seconds)]
    digests = {file.name: file.sha256 for file in last.summary.files}
    copied: dict[str, bytes] = dict.fromkeys(digests, b"")
    for part in chunks:
        copied[part.chunk.file] += part.chunk.data
    assert {name: sha256(data).digest() for name, data in copied.items()} == digests
    return set(copied)


CASES: Mapping[str, Case] = {
    "CreateStream": Case(Scene.submitted, lambda s, c: c.create_stream(s.config)),
    "DeleteStream": Case(Scene.submitted, lambda s, c: read(c.delete_stream(s.stream, force=True), lambda _: None)),
    "ListStreams": Case(Scene.created, lambda s, c: listed(s, c)),
    "SubmitPrompts": Case(Scene.created, lambda s, c: c.submit_prompts(s.stream, text_prompts(*PROMPTS))),
    "LeaseGroups": Case(
        Scene.submitted,
        lambda s, c: read(
            c.lease_groups(s.stream, "p", 2, request_id="the one"), lambda a: [lease.lease_id for lease in a.leases]
        ),
    ),
    "RenewLeases": Case(Scene.leased, lambda s, c: c.renew_leases([lease.lease_id for lease in s.leases])),
    "ReleaseLeases": Case(
        Scene.leased, lambda s, c: c.release_leases([pb.LeaseRelease(lease_id=lease.lease_id) for lease in s.leases])
    ),
    "RetryGroups": Case(
        Scene.failed,
        lambda s, c: c.retry_groups(s.stream, [lease.group_id for lease in s.leases], request_id="the one"),
    ),
    "DropGroups": Case(
        Scene.batched,
        lambda s, c: c.drop_groups(s.stream, [s.batch.groups[0].group_id], "poison", request_id="the one"),
    ),
    "PutGroups": Case(
        Scene.leased,
        lambda s, c: read(
            c.put_groups([complete_put(lease) for lease in s.leases]), lambda a: [each.state for each in a]
        ),
    ),
    "LeaseBatch": Case(Scene.put, lambda s, c: c.try_lease_batch(s.stream, s.epoch, 0)),
    "FetchSamples": Case(Scene.batched, lambda s, c: c.fetch_samples(s.stream, s.sample_ids)),
    "ConsumeBatch": Case(Scene.batched, lambda s, c: c.consume(s.stream, s.epoch, 0, s.batch.digest)),
    "CommitStep": Case(Scene.consumed, lambda s, c: read(c.commit(s.stream, s.epoch, 1), lambda _: None)),
    "Rewind": Case(Scene.consumed, lambda s, c: c.rewind(s.stream, 0, request_id="the one")),
    "SetPolicyVersion": Case(Scene.consumed, lambda s, c: c.set_policy_version(s.stream, s.epoch, 1)),
    "Watch": Case(Scene.consumed, lambda s, c: s.events(c, c._deadline_seconds)),
    "ListGroups": Case(Scene.consumed, lambda s, c: c.list_groups(s.stream)),
    "UploadColumn": Case(Scene.created, lambda s, c: c.upload_column(COLUMN)),
    "FetchColumn": Case(uploaded, lambda s, c: c.fetch_column(NAMED)),
    "Backup": Case(Scene.consumed, lambda s, c: backed_up(c)),
    "GetStats": Case(Scene.consumed, lambda s, c: c.stats(s.stream)),
}


async def read(answer: Awaitable[Any], what: Callable[[Any], object]) -> object:
    """What of an answer is the same however often it is asked for."""
    return what(await answer)


async def listed(scene: Scene, client: BufferClient) -> list[pb.StreamConfig]:
    return [config for config in await client.list_streams() if config.name == scene.stream]


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    async with served_buffer(SqliteStore(tmp_path), columns_folder=tmp_path / "columns") as (_, server):
        yield server.address


def test_every_method_of_the_service_has_a_case() -> None:
    assert sorted(CASES) == sorted(method.name for method in SERVICE.methods)


@pytest.mark.parametrize("method", CASES)
async def test_nothing_is_lost_or_doubled_and_every_call_ends(method: str, address: str) -> None:
    faults = list(product(Fault, Direction))
    await asyncio.gather(*(under_fault(method, address, fault, direction) for fault, direction in faults))


async def under_fault(method: str, address: str, fault: Fault, direction: Direction) -> None:
    """The case's call through this fault, and then through a healthy network."""
    case, what = CASES[method], f"{method} under {fault} of its {direction}"
    async with (
        BufferClient(address) as direct,
        fault_proxy(address) as proxy,
        BufferClient(proxy.address, deadline_seconds=DEADLINE_SECONDS) as faulty,
        BufferClient(proxy.address) as patient,
    ):
        scene, twin = (Scene(direct, f"{method}/{fault}/{direction}{name}") for name in ("", "/twin"))
        for each in (scene, twin):
            await case.prepare(each)
        await patient.list_streams()  # connected
        await asyncio.gather(faulty.list_streams(), return_exceptions=True)
        proxy.arm(fault, direction)
        async with asyncio.timeout(DEADLINE_SECONDS + 120):  # a call that does not end fails the test here
            while not proxy.times_met:  # on a slow machine the deadline can come before the fault
                with contextlib.suppress(DeadlineExceeded, Unavailable):
                    await case.call(scene, faulty)
        proxy.heal()
        assert await case.call(scene, patient) == await case.call(scene, direct), what
        await case.call(twin, direct)
        assert await scene.ledger() == await twin.ledger(), what
        if method in ("UploadColumn", "FetchColumn"):
            assert await direct.fetch_column(NAMED) == COLUMN.data, what
