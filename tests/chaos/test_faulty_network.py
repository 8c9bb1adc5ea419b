"""Every RPC of the buffer over a network that cuts, half-closes and swallows.

Each case prepares a stream of its own, makes its call through a faulty network under a deadline, and makes it again,
with the same keys, once the network is well. The ledger then shows the call's effect exactly once.
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

    async def events(self, client: BufferClient | None = None, deadline_seconds: float | None = None) -> list[Any]:
        """The stream's whole history so far."""
        end = max(group.position for group in (await self.client.list_groups(self.stream)).groups)
        found: list[pb.LedgerEvent] = []
        watching = (client or self.client).watch(self.stream, deadline_seconds=deadline_seconds)
        async for event in watching:
            found.append(event)
            if event.position >= end:
                break
        return found

    async def kinds(self) -> Counter[str]:
        """How often each kind of event has happened to a group."""
        return Counter(event.kind for event in await self.events() if event.group_id)

    async def states(self) -> dict[str, int]:
        return {name: count for name, count in (await self.client.stats(self.stream)).groups.items() if count}


@dataclass(frozen=True)
class Case:
    """`call` is made through the faulty network, twice; `check` gets its last answer."""

    prepare: Callable[[Scene], Awaitable[None]]
    call: Callable[[Scene, BufferClient], Awaitable[Any]]
    check: Callable[[Scene, Any], Awaitable[bool]]


async def stream_is_there_once(scene: Scene, answer: pb.CreateStreamResponse) -> bool:
    names = [config.name for config in await scene.client.list_streams()]
    return answer.config.name == scene.stream and names.count(scene.stream) == 1


async def stream_is_gone(scene: Scene, _: bool) -> bool:
    return scene.stream not in [config.name for config in await scene.client.list_streams()]


async def groups_are_there_once(scene: Scene, group_ids: Any) -> bool:
    there = [group.group_id for group in (await scene.client.list_groups(scene.stream)).groups]
    return list(group_ids) == sorted(there) and len(there) == len(PROMPTS)


async def two_are_leased(scene: Scene, answer: pb.LeaseGroupsResponse) -> bool:
    return len(answer.leases) == 2 and (await scene.kinds())["leased"] == 2


async def both_live_on(scene: Scene, answer: pb.RenewLeasesResponse) -> bool:
    return not answer.lost and await scene.states() == {"LEASED": 2, "QUEUED": 2}


async def both_went_back_once(scene: Scene, _: Any) -> bool:
    return (await scene.kinds())["released"] == 2 and await scene.states() == {"QUEUED": 4}


async def both_are_tried_again_once(scene: Scene, answer: pb.RetryGroupsResponse) -> bool:
    is_once = (answer.num_groups, answer.num_failed) == (2, 0) and (await scene.kinds())["retried"] == 2
    return is_once and await scene.states() == {"QUEUED": 4}


async def one_is_dropped_once(scene: Scene, answer: pb.DropGroupsResponse) -> bool:
    kinds = await scene.kinds()
    is_once = (answer.num_groups, answer.num_batches) == (1, 1) and (kinds["dropped"], kinds["unbatched"]) == (1, 1)
    return is_once and await scene.states() == {"DROPPED": 1, "READY": 1, "QUEUED": 2}


async def both_are_kept_once(scene: Scene, answer: Any) -> bool:
    is_ready = [result.state for result in answer] == [pb.GROUP_STATE_READY] * 2
    return is_ready and (await scene.kinds())["put"] == 2


async def the_batch_is_one(scene: Scene, answer: pb.LeaseBatchResponse) -> bool:
    again = await scene.client.try_lease_batch(scene.stream, scene.epoch, 0)
    return answer.ready and answer.digest == again.digest and (await scene.kinds())["batched"] == 2


async def samples_came_in_order(scene: Scene, answer: Any) -> bool:
    return [sample.envelope.sample_id for sample in answer] == scene.sample_ids


async def the_step_is_consumed_once(scene: Scene, answer: int) -> bool:
    return answer == 1 and (await scene.kinds())["consumed"] == 2


async def the_step_is_committed_once(scene: Scene, _: int) -> bool:
    return (await scene.kinds())["committed"] == 2 and (await scene.client.stats(scene.stream)).committed_step == 1


async def one_epoch_was_opened(scene: Scene, answer: pb.RewindResponse) -> bool:
    return answer.epoch == (await scene.client.stats(scene.stream)).epoch == scene.epoch + 1


async def the_version_is_set(scene: Scene, _: int) -> bool:
    return (await scene.client.stats(scene.stream)).policy_version == 1


async def uploaded(scene: Scene) -> None:
    await scene.client.upload_column(COLUMN)


async def the_column_is_whole(scene: Scene, _: Any) -> bool:
    return await scene.client.fetch_column(NAMED) == COLUMN.data


async def it_is_the_column(_: Scene, answer: bytes) -> bool:
    return answer == COLUMN.data


async def backed_up(client: BufferClient) -> list[pb.BackupResponse]:
    return [part async for part in client.backup(deadline_seconds=client._deadline_seconds)]


async def the_copy_is_whole(scene: Scene, answer: list[pb.BackupResponse]) -> bool:
    *chunks, last = answer
    digests = {file.name: file.sha256 for file in last.summary.files}
    copied: dict[str, bytes] = dict.fromkeys(digests, b"")
    for part in chunks:
        copied[part.chunk.file] += part.chunk.data
    return bool(copied) and {name: sha256(data).digest() for name, data in copied.items()} == digests


async def history_is_whole(scene: Scene, answer: Any) -> bool:
    return answer == await scene.events()


async def it_says_what_is_there(scene: Scene, answer: Any) -> bool:
    return answer == await scene.client.list_groups(scene.stream)


CASES: Mapping[str, Case] = {
    "CreateStream": Case(Scene.submitted, lambda s, c: c.create_stream(s.config), stream_is_there_once),
    "DeleteStream": Case(Scene.submitted, lambda s, c: c.delete_stream(s.stream, force=True), stream_is_gone),
    "ListStreams": Case(
        Scene.created, lambda s, c: c.list_streams(), lambda s, answer: stream_is_there_once(s, _named(s, answer))
    ),
    "SubmitPrompts": Case(
        Scene.created, lambda s, c: c.submit_prompts(s.stream, text_prompts(*PROMPTS)), groups_are_there_once
    ),
    "LeaseGroups": Case(
        Scene.submitted, lambda s, c: c.lease_groups(s.stream, "p", 2, request_id="the one"), two_are_leased
    ),
    "RenewLeases": Case(
        Scene.leased, lambda s, c: c.renew_leases([lease.lease_id for lease in s.leases]), both_live_on
    ),
    "ReleaseLeases": Case(
        Scene.leased,
        lambda s, c: c.release_leases([pb.LeaseRelease(lease_id=lease.lease_id) for lease in s.leases]),
        both_went_back_once,
    ),
    "RetryGroups": Case(
        Scene.failed,
        lambda s, c: c.retry_groups(s.stream, [lease.group_id for lease in s.leases], request_id="the one"),
        both_are_tried_again_once,
    ),
    "DropGroups": Case(
        Scene.batched,
        lambda s, c: c.drop_groups(s.stream, [s.batch.groups[0].group_id], "poison", request_id="the one"),
        one_is_dropped_once,
    ),
    "PutGroups": Case(
        Scene.leased, lambda s, c: c.put_groups([complete_put(lease) for lease in s.leases]), both_are_kept_once
    ),
    "LeaseBatch": Case(Scene.put, lambda s, c: c.try_lease_batch(s.stream, s.epoch, 0), the_batch_is_one),
    "FetchSamples": Case(Scene.batched, lambda s, c: c.fetch_samples(s.stream, s.sample_ids), samples_came_in_order),
    "ConsumeBatch": Case(
        Scene.batched, lambda s, c: c.consume(s.stream, s.epoch, 0, s.batch.digest), the_step_is_consumed_once
    ),
    "CommitStep": Case(Scene.consumed, lambda s, c: c.commit(s.stream, s.epoch, 1), the_step_is_committed_once),
    "Rewind": Case(Scene.consumed, lambda s, c: c.rewind(s.stream, 0, request_id="the one"), one_epoch_was_opened),
    "SetPolicyVersion": Case(
        Scene.consumed, lambda s, c: c.set_policy_version(s.stream, s.epoch, 1), the_version_is_set
    ),
    "Watch": Case(Scene.consumed, lambda s, c: s.events(c, c._deadline_seconds), history_is_whole),
    "ListGroups": Case(Scene.consumed, lambda s, c: c.list_groups(s.stream), it_says_what_is_there),
    "UploadColumn": Case(Scene.created, lambda s, c: c.upload_column(COLUMN), the_column_is_whole),
    "FetchColumn": Case(uploaded, lambda s, c: c.fetch_column(NAMED), it_is_the_column),
    "Backup": Case(Scene.consumed, lambda s, c: backed_up(c), the_copy_is_whole),
    "GetStats": Case(Scene.consumed, lambda s, c: c.stats(s.stream), lambda s, answer: _stats_are(s, answer)),
}


def _named(scene: Scene, streams: Any) -> pb.CreateStreamResponse:
    (config,) = [config for config in streams if config.name == scene.stream]
    return pb.CreateStreamResponse(config=config)


async def _stats_are(scene: Scene, answer: pb.StreamStats) -> bool:
    return answer == await scene.client.stats(scene.stream)


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
        scene = Scene(direct, f"{method}/{fault}/{direction}")
        await case.prepare(scene)
        await patient.list_streams()  # connected
        await asyncio.gather(faulty.list_streams(), return_exceptions=True)
        proxy.arm(fault, direction)
        async with asyncio.timeout(DEADLINE_SECONDS + 120):  # a call that does not end fails the test here
            while not proxy.times_met:  # on a slow machine the deadline can come before the fault
                with contextlib.suppress(DeadlineExceeded, Unavailable):
                    await case.call(scene, faulty)
        proxy.heal()
        assert await case.check(scene, await case.call(scene, patient)), what
