"""No call holds the event loop for long, not at the protocol's limits either: the work of each callback is counted.

Everybody else waits for a callback. Its work is counted in calls of functions (Python's own and C's) and in bytes that
are hashed. Both are the same on a busy machine. Long work is paced by the clock: a slow machine does less at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import threading
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import islice
from pathlib import Path
from typing import Any

import blake3
import crc32c
import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from headrace import limits
from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.rpc.server import OPTIONS
from services.buffer.runtime.application import BufferApplication
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore
from tests.support.call_counter import CallCounter
from tests.support.ledgers.buffer_samples import completed_sample, failed_put
from tests.support.processes.buffer_server import served_buffer

MESSAGES = {name: GetMessageClass(kind) for name, kind in pb.DESCRIPTOR.message_types_by_name.items()}
MOST_CALLS = 250_000
"""Some 50 ms."""
MOST_HASHED_BYTES = 4 << 20
"""2 ms."""


@dataclass
class Work:
    """The most that one callback has done."""

    calls: int = 0
    hashed_bytes: int = 0

    @property
    def is_short(self) -> bool:
        return self.calls < MOST_CALLS and self.hashed_bytes < MOST_HASHED_BYTES


@dataclass
class Watchdog:
    """The longest callbacks of the loop, by the request that was made."""

    longest: dict[str, Work] = dataclass_field(default_factory=dict)
    call: str | None = None
    hashed_bytes: int = 0
    counter: CallCounter = dataclass_field(default_factory=CallCounter)

    @contextmanager
    def watching(self, call: str) -> Iterator[None]:
        self.call = call
        try:
            yield
        finally:
            self.call = None

    def note(self, num_calls: int, hashed_bytes: int) -> None:
        assert self.call
        work = self.longest.setdefault(self.call, Work())
        work.calls = max(num_calls, work.calls)
        work.hashed_bytes = max(hashed_bytes, work.hashed_bytes)

    @property
    def too_long(self) -> dict[str, Work]:
        return {call: work for call, work in self.longest.items() if not work.is_short}


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    watchdog, run, loop_thread = Watchdog(), events.Handle._run, threading.get_ident()

    def counted(handle: events.Handle) -> None:
        call, calls_before, hashed_before = watchdog.call, watchdog.counter.num_calls, watchdog.hashed_bytes
        if call is None:
            run(handle)
            return
        with watchdog.counter:
            run(handle)
        if call == watchdog.call:
            watchdog.note(watchdog.counter.num_calls - calls_before, watchdog.hashed_bytes - hashed_before)

    def weighed(function: Callable[..., Any]) -> Callable[..., Any]:
        def hashed(data: Any = b"", *arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == loop_thread:
                watchdog.hashed_bytes += len(data)
            return function(data, *arguments, **options)

        return hashed

    hashes = {function: weighed(function) for function in (blake3.blake3, hashlib.sha256, crc32c.crc32c)}
    for module in [module for name, module in sys.modules.items() if name.startswith(("headrace.", "services."))]:
        for name, value in list(vars(module).items()):
            if callable(value) and any(value is function for function in hashes):
                monkeypatch.setattr(module, name, hashes[value])
    monkeypatch.setattr(hashlib, "sha256", hashes[hashlib.sha256])
    monkeypatch.setattr(events.Handle, "_run", counted)
    return watchdog


class Calls:
    """Calls by a client in a thread of its own: all that the server's loop does for them is measured.

    Whatever the loop's callbacks do that began before a call or go on behind it is the test's own work.
    """

    def __init__(self, address: str, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def close(self) -> None:
        self._channel.close()

    async def __call__(self, method: str, request: Any, label: str = "") -> Any:
        """What the buffer answers; of a stream all its messages."""
        description = pb.DESCRIPTOR.services_by_name["BufferService"].methods_by_name[method]
        answers = await self.send(method, request.SerializeToString(), label)
        parsed = [MESSAGES[description.output_type.name].FromString(answer) for answer in answers]
        return parsed if description.server_streaming else parsed[0]

    async def send(self, method: str, data: bytes, label: str = "", stop_after: int | None = None) -> list[bytes]:
        """The same in bytes."""
        description = pb.DESCRIPTOR.services_by_name["BufferService"].methods_by_name[method]
        path = f"/{description.containing_service.full_name}/{method}"

        def call() -> list[bytes]:
            if not description.server_streaming:
                return [self._channel.unary_unary(path, None, None)(data, timeout=120)]
            replies = self._channel.unary_stream(path, None, None)(data, timeout=120)
            some = list(islice(replies, stop_after))
            replies.cancel()
            return some

        with self.watchdog.watching(f"{method} {label}".strip()):
            return await asyncio.to_thread(call)


def prompts(first: int, count: int, **fields: Any) -> pb.SubmitPromptsRequest:
    some = [sample_pb2.Prompt(prompt_id=f"p{i}", text=f"What is {i}?", **fields) for i in range(first, first + count)]
    return pb.SubmitPromptsRequest(stream="train", prompts=some)


def put_of(lease: pb.GroupLease, tag_bytes: int = 0) -> pb.GroupPut:
    """All of its samples; each with so many bytes of tags."""
    packed = completed_sample(lease, 0, 0).pack()
    for i in range(tag_bytes // 2_000):
        packed.envelope.tags[f"{i}"] = "x" * 2_000
    put = pb.GroupPut(lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE)
    for i in range(lease.n_samples):
        sample = put.samples.add()
        sample.CopyFrom(packed)
        sample.envelope.sample_id, sample.envelope.index = f"{lease.lease_id}/{i}", i
    return put


async def at_the_limits(buffer: BufferApplication, call: Calls) -> None:
    """Every call of the buffer, as large as it may be."""
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
    batch = await call("LeaseBatch", batch_request)
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
    with call.watchdog.watching("DeleteStream and what follows"):
        while "train" in buffer.ledger.leftovers:
            await asyncio.sleep(0.01)


async def large_payloads(buffer: BufferApplication, call: Calls) -> None:
    """Columns, piece by piece, and requests of as many bytes as they may have."""
    data = random.Random(0).randbytes(4 * limits.MAX_UPLOAD_BYTES)
    name = hashlib.sha256(data).digest()
    for offset in range(0, len(data), limits.MAX_UPLOAD_BYTES):
        request = pb.UploadColumnRequest(sha256=name, num_bytes=len(data), offset=offset)
        request.data = data[offset : offset + limits.MAX_UPLOAD_BYTES]
        await call("UploadColumn", request)
    assert b"".join(part.data for part in await call("FetchColumn", pb.FetchColumnRequest(sha256=name))) == data
    config = pb.StreamConfig(name="train", n_samples_per_prompt=1, groups_per_step=1)
    await call("CreateStream", pb.CreateStreamRequest(config=config))
    large = [sample_pb2.Prompt(prompt_id=f"{i}", text="x" * ((8 << 20) - 100)) for i in range(3)]
    await call("SubmitPrompts", pb.SubmitPromptsRequest(stream="train", prompts=large), "of 24 MiB")


@pytest.mark.parametrize("scene", [at_the_limits, large_payloads])
async def test_no_call_holds_the_loop(watchdog: Watchdog, scene: Any, tmp_path: Path) -> None:
    async with served_buffer(MemoryStore(), columns_folder=tmp_path) as (buffer, server):
        await scene(buffer, call := Calls(server.address, watchdog))
        call.close()
    assert watchdog.longest
    assert watchdog.too_long == {}


async def test_a_backup_does_not_hold_the_loop(tmp_path: Path, watchdog: Watchdog) -> None:
    async with served_buffer(SqliteStore(tmp_path / "ledger"), columns_folder=tmp_path / "columns") as (buffer, server):
        call = Calls(server.address, watchdog)
        await large_payloads(buffer, call)
        parts = await call("Backup", pb.BackupRequest())
        call.close()
    assert sum(len(part.chunk.data) for part in parts) > 24 << 20
    assert watchdog.longest["Backup"].is_short, watchdog.longest
