"""No call holds the event loop for long, not at the protocol's limits either: the CPU time of every step is measured.

What is measured is a callback of the loop, for which everybody else waits, in CPU time of its thread; and beside
it a piece of work that is always the same, for a machine whose cores are shared computes more slowly.
"""

from __future__ import annotations

import asyncio
import gc
import time
from asyncio import events
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.wire import limits
from services.buffer.application import Buffer
from services.buffer.servicer import BufferServicer
from services.buffer.store.memory import MemoryStore
from services.buffer.wire_bytes import parse_puts
from tests.support.buffer_samples import completed_sample, failed_put

MOST_SECONDS = 0.05
CALM_SECONDS = 0.009
"""Of `slowness` where nothing else runs."""


@dataclass
class Watchdog:
    """The longest step of the loop, by the call that was made."""

    longest: dict[str, float] = field(default_factory=dict)
    call: str | None = None

    @contextmanager
    def watching(self, call: str) -> Iterator[None]:
        self.call = call
        try:
            yield
        finally:
            self.call = None

    def note(self, seconds: float) -> None:
        if self.call:
            self.longest[self.call] = max(seconds, self.longest.get(self.call, 0.0))


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    watchdog, run = Watchdog(), events.Handle._run

    def timed(handle: events.Handle) -> None:
        began = time.thread_time()
        run(handle)
        watchdog.note(time.thread_time() - began)

    monkeypatch.setattr(events.Handle, "_run", timed)
    gc.collect()
    gc.disable()  # a collection counts what the test made
    yield watchdog
    gc.enable()


def slowness() -> float:
    """How many times longer than on a calm machine the same work takes now; at least 1."""
    began = time.thread_time()
    sum([len(str(i)) for i in range(100_000)])
    return max((time.thread_time() - began) / CALM_SECONDS, 1.0)


class Context:
    def time_remaining(self) -> float:
        return 600.0


class Calls:
    """The servicer's methods as gRPC would call them, but for the bytes on the wire."""

    def __init__(self, buffer: Buffer, watchdog: Watchdog) -> None:
        self.servicer = BufferServicer(buffer)
        self.watchdog = watchdog

    async def __call__(self, method: str, request: Any, label: str = "") -> Any:
        if method == "PutGroups":
            request = parse_puts(request.SerializeToString())
        handler = getattr(self.servicer, method)(request, Context())
        with self.watchdog.watching(f"{method} {label}".strip()):
            if hasattr(handler, "__aiter__"):
                return [answer async for answer in handler]
            return await asyncio.create_task(handler)


def prompts(first: int, count: int, **fields: Any) -> pb.SubmitPromptsRequest:
    some = [sample_pb2.Prompt(prompt_id=f"p{i}", text=f"What is {i}?", **fields) for i in range(first, first + count)]
    return pb.SubmitPromptsRequest(stream="train", prompts=some)


def put_of(lease: pb.GroupLease) -> pb.GroupPut:
    packed = completed_sample(lease, 0, 0).pack()
    put = pb.GroupPut(lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE)
    for i in range(lease.n_samples):
        sample = put.samples.add()
        sample.CopyFrom(packed)
        sample.envelope.sample_id, sample.envelope.index = f"{lease.lease_id}/{i}", i
    return put


async def at_the_limits(buffer: Buffer, watchdog: Watchdog) -> None:
    """Every call of the buffer, as large as it may be."""
    call = Calls(buffer, watchdog)
    config = pb.StreamConfig(
        name="train", n_samples_per_prompt=8, groups_per_step=limits.MAX_GROUPS_PER_STEP, max_attempts=1,
        lease_seconds=600.0, retain_steps=0,
    )  # fmt: skip
    await call("CreateStream", pb.CreateStreamRequest(config=config))
    for first in (0, 10_000):
        await call("SubmitPrompts", prompts(first, limits.MAX_PROMPTS_PER_CALL), "of 10,000")
    await call("SubmitPrompts", prompts(0, limits.MAX_PROMPTS_PER_CALL), "of 10,000 again")
    deep = '{"a":[' + ",".join(["[1]"] * 200_000) + "]}"
    await call("SubmitPrompts", prompts(90_000, 16, metadata_json=deep), "with large metadata")
    leases: list[pb.GroupLease] = []
    for i in range(14):
        request = pb.LeaseGroupsRequest(stream="train", producer_id="p", request_id=f"{i}", max_groups=1_000)
        leases += (await call("LeaseGroups", request)).leases
    await call("RenewLeases", pb.RenewLeasesRequest(lease_ids=[x.lease_id for x in leases[:10_000]]))
    spare, leases = leases[: limits.MAX_RELEASES_PER_CALL], leases[limits.MAX_RELEASES_PER_CALL :]
    releases = [pb.LeaseRelease(lease_id=x.lease_id, reason="no") for x in spare]
    await call("ReleaseLeases", pb.ReleaseLeasesRequest(releases=releases))
    failed, leases = leases[: limits.MAX_RETRIES_PER_CALL], leases[limits.MAX_RETRIES_PER_CALL :]
    for first in range(0, len(failed), 1_000):
        puts = [failed_put(x) for x in failed[first : first + 1_000]]
        await call("PutGroups", pb.PutGroupsRequest(groups=puts), "of 1,000 failed")
    await call("RetryGroups", pb.RetryGroupsRequest(stream="train", request_id="r"))
    for first in range(0, limits.MAX_GROUPS_PER_STEP, 128):
        request = pb.PutGroupsRequest(groups=[put_of(x) for x in leases[first : first + 128]])
        await call("PutGroups", request, "of 1,024 samples")
        await call("PutGroups", request, "of 1,024 samples again")
    epoch = (await call("Rewind", pb.RewindRequest(stream="train", request_id="r"))).epoch
    batch_request = pb.LeaseBatchRequest(stream="train", epoch=epoch, step=0)
    batch = pb.LeaseBatchResponse.FromString(await call("LeaseBatch", batch_request))
    assert len(batch.groups) == limits.MAX_GROUPS_PER_STEP
    ids = [sample.sample_id for group in batch.groups for sample in group.samples]
    await call("FetchSamples", pb.FetchSamplesRequest(stream="train", sample_ids=ids))
    await call("FetchSamples", pb.FetchSamplesRequest(stream="train", sample_ids=ids[:1] * 65_536), "one")
    await call("ListGroups", pb.ListGroupsRequest(stream="train", page_size=1_000))
    named = [group.group_id for group in batch.groups[:1_000]]
    await call("ListGroups", pb.ListGroupsRequest(stream="train", group_ids=named), "named")
    await call("ConsumeBatch", pb.ConsumeBatchRequest(stream="train", epoch=epoch, step=0, digest=batch.digest))
    epoch = (await call("Rewind", pb.RewindRequest(stream="train", request_id="back"), "of a step")).epoch
    batch_request = pb.LeaseBatchRequest(stream="train", epoch=epoch, step=0)
    await call("LeaseBatch", batch_request, "again")
    await call("ConsumeBatch", pb.ConsumeBatchRequest(stream="train", epoch=epoch, step=0, digest=batch.digest))
    await call("SetPolicyVersion", pb.SetPolicyVersionRequest(stream="train", epoch=epoch, policy_version=1))
    await call("CommitStep", pb.CommitStepRequest(stream="train", epoch=epoch, step=1))
    await call("GetStats", pb.GetStatsRequest())
    await call("ListStreams", pb.ListStreamsRequest())
    await call("DeleteStream", pb.DeleteStreamRequest(stream="train", force=True))
    with watchdog.watching("DeleteStream and what follows"):
        while buffer.ledger.deleted["train"].groups:
            await asyncio.sleep(0.01)


async def many_streams(buffer: Buffer, watchdog: Watchdog) -> None:
    call = Calls(buffer, watchdog)
    for i in range(limits.MAX_STREAMS):
        config = pb.StreamConfig(name=f"{i}", n_samples_per_prompt=1, groups_per_step=1)
        await call("CreateStream", pb.CreateStreamRequest(config=config))
    await call("ListStreams", pb.ListStreamsRequest(), "of 256")
    await call("GetStats", pb.GetStatsRequest(), "of 256")


async def many_drops(buffer: Buffer, watchdog: Watchdog) -> None:
    """Half of the largest batch: it is dissolved; and as many that are queued."""
    call = Calls(buffer, watchdog)
    config = pb.StreamConfig(name="train", n_samples_per_prompt=1, groups_per_step=limits.MAX_GROUPS_PER_STEP)
    await call("CreateStream", pb.CreateStreamRequest(config=config))
    group_ids = (await call("SubmitPrompts", prompts(0, 4_000))).group_ids
    for i in range(3):
        request = pb.LeaseGroupsRequest(stream="train", producer_id="p", request_id=f"{i}", max_groups=800)
        puts = [put_of(lease) for lease in (await call("LeaseGroups", request)).leases]
        await call("PutGroups", pb.PutGroupsRequest(groups=puts))
    epoch = (await call("Rewind", pb.RewindRequest(stream="train", request_id="r"))).epoch
    assert await call("LeaseBatch", pb.LeaseBatchRequest(stream="train", epoch=epoch, step=0))
    for first, num_batches in ((0, 1), (len(group_ids) - limits.MAX_DROPS_PER_CALL, 0)):
        drop = pb.DropGroupsRequest(stream="train", request_id=f"{first}", reason="poison")
        drop.group_ids.extend(group_ids[first : first + limits.MAX_DROPS_PER_CALL])
        reply = await call("DropGroups", drop, f"of {num_batches} batches")
        assert (reply.num_groups, reply.num_batches) == (limits.MAX_DROPS_PER_CALL, num_batches)


async def many_steps(buffer: Buffer, watchdog: Watchdog) -> None:
    """A step number far ahead, stale groups by the thousand."""
    call = Calls(buffer, watchdog)
    config = pb.StreamConfig(
        name="train", n_samples_per_prompt=1, groups_per_step=8, max_staleness=2_000, lease_seconds=600.0,
        retain_steps=0,
        over_sampling_groups=limits.MAX_GROUPS_PER_STEP, expiry_action=pb.EXPIRY_ACTION_DROP,
    )  # fmt: skip
    await call("CreateStream", pb.CreateStreamRequest(config=config))
    await call("SubmitPrompts", prompts(0, 10_000))
    leases: list[pb.GroupLease] = []
    for i in range(8):
        request = pb.LeaseGroupsRequest(stream="train", producer_id="p", request_id=f"{i}", max_groups=1_000)
        leases += (await call("LeaseGroups", request)).leases
        done = leases[-500:]
        for first in (0, 250):
            await call("PutGroups", pb.PutGroupsRequest(groups=[put_of(x) for x in done[first : first + 250]]))
    epoch = (await call("Rewind", pb.RewindRequest(stream="train", step=900_000, request_id="ahead"))).epoch
    request = pb.SetPolicyVersionRequest(stream="train", epoch=epoch, policy_version=900_000)
    assert (await call("SetPolicyVersion", request, "that expires thousands")).num_expired > 3_000
    await call("CommitStep", pb.CommitStepRequest(stream="train", epoch=epoch, step=900_000), "of 900,000 steps")


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[Buffer]:
    buffer = await Buffer.open(MemoryStore())
    yield buffer
    await buffer.close()


@pytest.mark.parametrize("scene", [at_the_limits, many_streams, many_drops, many_steps])
async def test_no_call_holds_the_loop(buffer: Buffer, watchdog: Watchdog, scene: Any) -> None:
    before = slowness()
    await scene(buffer, watchdog)
    most = MOST_SECONDS * max(before, slowness())
    assert not {call: seconds for call, seconds in watchdog.longest.items() if seconds > most}
