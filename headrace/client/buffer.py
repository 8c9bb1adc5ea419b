"""The buffer's client: one method for each call, with plain arguments, the server's errors and a deadline."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from google.protobuf.message import Message

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.client.put_queue import PutQueue
from headrace.digest import digest_of
from headrace.errors import DataLoss, DeadlineExceeded, FailedPrecondition, Fenced, NotFound
from headrace.rpc import client as rpc
from headrace.rpc.client import DEFAULT_DEADLINE_SECONDS, Closing, connect, resumed
from headrace.rpc.retry import retry_until
from headrace.trajectory import check_payload, parsed_payload

# Moves large columns separately: they are taken out of a sample before a put and put back when it is fetched.
#
# Callers that put or fetch samples through a client never see it. A sample comes back byte for byte as it was packed.

LARGE_COLUMN_BYTES = 1 << 20
_PIECE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class LargeColumn:
    """The bytes of a column, by their SHA-256."""

    sha256: bytes
    data: bytes


def taken_out(sample: sample_pb2.Sample) -> tuple[sample_pb2.Sample, Sequence[LargeColumn]]:
    """The sample without its large columns, and these; the sample itself when it has none."""
    if sample.envelope.payload_bytes < LARGE_COLUMN_BYTES:
        return sample, ()
    payload = sample_pb2.SamplePayload.FromString(sample.payload)
    envelope = sample_pb2.SampleEnvelope()
    envelope.CopyFrom(sample.envelope)
    large: list[LargeColumn] = []
    for column in payload.columns:
        if len(column.data) >= LARGE_COLUMN_BYTES:
            large.append(LargeColumn(hashlib.sha256(column.data).digest(), column.data))
            envelope.out_of_line.add(name=column.name, sha256=large[-1].sha256, num_bytes=len(column.data))
            column.ClearField("data")
    return (_sealed(envelope, payload), large) if large else (sample, ())


def put_back(sample: sample_pb2.Sample, data: Mapping[bytes, bytes]) -> sample_pb2.Sample:
    """The sample as it was packed. Raises as `Sample.unpack`.

    `data` maps the SHA-256 of an out-of-line column to its bytes.
    """
    envelope = sample.envelope
    check_payload(envelope.sample_id, envelope.digest, envelope.payload_bytes, sample.payload)
    payload = parsed_payload(envelope.sample_id, sample.payload)
    sha256_of = {column.name: column.sha256 for column in sample.envelope.out_of_line}
    for column in payload.columns:
        if column.name in sha256_of:
            column.data = data[sha256_of[column.name]]
    envelope = sample_pb2.SampleEnvelope()
    envelope.CopyFrom(sample.envelope)
    envelope.ClearField("out_of_line")
    return _sealed(envelope, payload)


def _sealed(envelope: sample_pb2.SampleEnvelope, payload: sample_pb2.SamplePayload) -> sample_pb2.Sample:
    data = payload.SerializeToString(deterministic=True)
    envelope.digest, envelope.payload_bytes = digest_of(data), len(data)
    return sample_pb2.Sample(envelope=envelope, payload=data)


PROGRESS_SECONDS = 2.0


class BatchClient(Closing):
    """What a client of one buffer and one of several shards have in common."""

    @abstractmethod
    async def try_lease_batch(
        self, stream: str, epoch: int, step: int, *, wait_seconds: float = 0.0
    ) -> pb.LeaseBatchResponse: ...

    async def lease_batch(
        self,
        stream: str,
        epoch: int,
        step: int,
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[[int], None] | None = None,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> pb.LeaseBatchResponse:
        """Waits until the batch is full. `on_progress` gets the number of READY groups every `progress_seconds`."""
        loop = asyncio.get_running_loop()
        end = None if timeout_seconds is None else loop.time() + timeout_seconds
        while True:
            left = progress_seconds if end is None else max(min(progress_seconds, end - loop.time()), 0.0)
            reply = await self.try_lease_batch(stream, epoch, step, wait_seconds=left)
            if reply.ready:
                return reply
            if on_progress:
                on_progress(reply.groups_ready)
            if end is not None and loop.time() >= end:
                raise DeadlineExceeded(
                    f"step {step} of {stream} has {reply.groups_ready} groups ready after {timeout_seconds:g} s, "
                    "too few for a batch: check that producers run"
                )


# Many local waiters, few calls that wait at the server.
#
# A call that waits costs the server some 24 KB. Callers that wait for the same thing therefore queue here, in the order
# in which they came: the first few each have a call that waits at the server, and who is answered lets the next one
# ask. Nothing is missed, because there is nothing for anybody in the queue as long as the calls at its head wait.

_Answer = TypeVar("_Answer")

WAITING_AT_ONCE = 8
"""The number of calls that wait for one thing: when much arrives at once, a round trip serves that many."""
LOOKING_AT_ONCE = 64
"""Calls that do not wait, of those whose time ended in the queue."""

Ask = Callable[[float, float], Awaitable[_Answer]]
"""(seconds to wait at the server, seconds until the call's deadline)."""


class SharedWaits:
    """The queues of one client. Each caller sends its own request and gets its own answer or error."""

    def __init__(self) -> None:
        self._queues: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()
        self._looks = asyncio.Semaphore(LOOKING_AT_ONCE)

    async def ask(self, awaited: Hashable, ask: Ask[_Answer], wait_seconds: float, deadline_seconds: float) -> _Answer:
        """Asks when it is this caller's turn, at the latest after `wait_seconds`, and then without a wait.

        Callers of equal `awaited` must be such that the server lets one of them go on exactly when it would let any.
        """
        if not 0 < wait_seconds < math.inf:
            return await ask(wait_seconds, deadline_seconds)
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_seconds
        queue = self._queues.setdefault(awaited, asyncio.Semaphore(WAITING_AT_ONCE))
        if not await _acquired(queue, end):
            return await self._look(ask, end + deadline_seconds)
        try:
            return await ask(max(end - loop.time(), 0.0), deadline_seconds)
        finally:
            queue.release()

    async def _look(self, ask: Ask[_Answer], end: float) -> _Answer:
        """Asks without a wait; many waits may end in the same moment."""
        if not await _acquired(self._looks, end):
            raise DeadlineExceeded(
                f"{LOOKING_AT_ONCE} calls of this client before this one got no answer until its deadline: "
                "check that the server runs"
            )
        try:
            return await ask(0.0, max(end - asyncio.get_running_loop().time(), 0.0))
        finally:
            self._looks.release()


async def _acquired(semaphore: asyncio.Semaphore, end: float) -> bool:
    """Returns False when it was not this caller's turn before the loop's time `end`."""
    try:
        async with asyncio.timeout_at(end):
            return await semaphore.acquire()
    except TimeoutError:
        return False


_OfStream = (
    pb.SubmitPromptsRequest
    | pb.LeaseGroupsRequest
    | pb.RetryGroupsRequest
    | pb.DropGroupsRequest
    | pb.LeaseBatchRequest
    | pb.ConsumeBatchRequest
    | pb.CommitStepRequest
    | pb.RewindRequest
    | pb.SetPolicyVersionRequest
)
_FETCH_AT_ONCE = 512
_RELEASES_AT_ONCE = 500
_RELEASE_BYTES = 16 << 20


class BufferClient(BatchClient):
    """Speaks to one buffer. Close it, or use it as a context."""

    def __init__(self, address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> None:
        self.address = address
        self._channel = connect(address)
        self._peer = f"the buffer at {address}"
        self._stub = buffer_pb2_grpc.BufferServiceStub(self._channel)
        self._put_groups = self._channel.unary_unary(
            "/headrace.api.buffer.v1.BufferService/PutGroups",
            request_serializer=bytes,
            response_deserializer=pb.PutGroupsResponse.FromString,
        )
        self._puts = PutQueue(self._send_puts)
        self._waits = SharedWaits()
        self._stream_ids: dict[str, str] = {}
        """Of the streams that this client works with, so that no call of it reaches a later stream of the same name."""
        self._deadline_seconds = deadline_seconds

    async def close(self) -> None:
        await self._puts.close()
        await self._channel.close(None)

    # Streams and prompts

    async def create_stream(self, config: pb.StreamConfig) -> pb.CreateStreamResponse:
        """Creates the stream if it does not exist. Raises AlreadyExists when it exists with another config."""
        request = pb.CreateStreamRequest(config=config)
        reply = await self._call(self._stub.CreateStream, request)
        self._stream_ids[config.name] = reply.stream_id
        return reply

    async def delete_stream(self, stream: str, *, force: bool = False) -> bool:
        """True when the stream existed. Without `force` a stream with groups that are to be trained is refused.

        It deletes the stream that this client knows by the name, and no later one, however often it is retried.
        """
        try:
            stream_id = await self._stream_id(stream)
        except NotFound:
            return False
        request = pb.DeleteStreamRequest(stream=stream, force=force, stream_id=stream_id)
        reply = await self._call(self._stub.DeleteStream, request)
        self._stream_ids.pop(stream, None)
        return reply.deleted

    async def list_streams(self) -> Sequence[pb.StreamConfig]:
        """All streams of the buffer."""
        reply = await self._call(self._stub.ListStreams, pb.ListStreamsRequest())
        return reply.streams

    async def submit_prompts(self, stream: str, prompts: Sequence[sample_pb2.Prompt]) -> Sequence[str]:
        """Group ids, one for each prompt."""
        request = pb.SubmitPromptsRequest(stream=stream, prompts=prompts)
        reply = await self._call_of_stream(self._stub.SubmitPrompts, request)
        return reply.group_ids

    # Producers

    async def lease_groups(
        self,
        stream: str,
        producer_id: str,
        max_groups: int,
        *,
        wait_seconds: float = 0.0,
        request_id: str | None = None,
        oldest_version: int | None = None,
    ) -> pb.LeaseGroupsResponse:
        """Groups, or none and why, at once when `oldest_version` has grown. Retries of the call never lease twice.

        Waits share a few calls, but for those with a `request_id`, which may have been granted before.
        """
        request = pb.LeaseGroupsRequest(
            stream=stream,
            producer_id=producer_id,
            request_id=request_id or uuid.uuid4().hex,
            max_groups=max_groups,
            wait_seconds=wait_seconds,
            oldest_version=oldest_version,
        )
        awaited = (stream, oldest_version) if request_id is None else request.request_id
        async with self._of_stream(request):
            reply = await self._wait(awaited, self._stub.LeaseGroups, request)
        for sample in (sample for lease in reply.leases for sample in lease.partial_samples):
            if sample.envelope.out_of_line:
                sample.CopyFrom(await self._whole(sample, self._deadline_seconds))
        return reply

    async def renew_leases(self, lease_ids: Sequence[str]) -> pb.RenewLeasesResponse:
        """The response lists the leases that were renewed and those that are lost."""
        request = pb.RenewLeasesRequest(lease_ids=lease_ids)
        return await self._call(self._stub.RenewLeases, request)

    async def release_leases(self, releases: Sequence[pb.LeaseRelease]) -> None:
        """Returns unfinished groups with their partial samples."""
        some: list[pb.LeaseRelease] = []
        num_bytes = 0
        for release in [await self._slim_release(release) for release in releases]:
            if some and (len(some) == _RELEASES_AT_ONCE or num_bytes + release.ByteSize() > _RELEASE_BYTES):
                await self._call(self._stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=some))
                some, num_bytes = [], 0
            some.append(release)
            num_bytes += release.ByteSize()
        await self._call(self._stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=some))

    async def put_groups(self, puts: Sequence[pb.GroupPut]) -> Sequence[pb.PutResult]:
        """One result for each put, in order; `refused` is set when its lease was lost. All are stored or none."""
        puts = [await self._slim_put(put) for put in puts]
        return await self._puts.put(puts, self._deadline_seconds)

    async def _send_puts(self, request: bytes, deadline_seconds: float) -> pb.PutGroupsResponse:
        return await rpc.call(self._put_groups, request, deadline_seconds=deadline_seconds, peer=self._peer)

    async def retry_groups(
        self, stream: str, group_ids: Sequence[str] = (), *, request_id: str | None = None
    ) -> pb.RetryGroupsResponse:
        """Queues FAILED groups with all of their attempts; without ids the latest 4,096. Repeats do nothing."""
        request = pb.RetryGroupsRequest(stream=stream, request_id=request_id or uuid.uuid4().hex, group_ids=group_ids)
        return await self._call_of_stream(self._stub.RetryGroups, request)

    async def drop_groups(
        self, stream: str, group_ids: Sequence[str], reason: str, *, request_id: str | None = None
    ) -> pb.DropGroupsResponse:
        """Drops groups, so that they are never trained, and dissolves batches that have one. Repeats do nothing."""
        request = pb.DropGroupsRequest(
            stream=stream, request_id=request_id or uuid.uuid4().hex, group_ids=group_ids, reason=reason
        )
        return await self._call_of_stream(self._stub.DropGroups, request)

    # The trainer

    async def rewind(
        self, stream: str, step: int, *, request_id: str | None = None, least_epoch: int = 0
    ) -> pb.RewindResponse:
        """Returns the epoch that this trainer owns from now on. Use one request_id for each start of a trainer."""
        request = pb.RewindRequest(
            stream=stream, step=step, request_id=request_id or uuid.uuid4().hex, least_epoch=least_epoch
        )
        return await self._call_of_stream(self._stub.Rewind, request)

    async def try_lease_batch(
        self, stream: str, epoch: int, step: int, *, wait_seconds: float = 0.0
    ) -> pb.LeaseBatchResponse:
        """The batch when it is full, else the number of groups that are ready."""
        request = pb.LeaseBatchRequest(stream=stream, epoch=epoch, step=step, wait_seconds=wait_seconds)
        async with self._of_stream(request):
            reply = await self._wait((stream, epoch, step), self._stub.LeaseBatch, request)
            while reply.next_group:
                request.first_group = reply.next_group
                page = await self._call(self._stub.LeaseBatch, request)
                reply.groups.extend(page.groups)
                reply.next_group = page.next_group
        return reply

    async def fetch_samples(
        self,
        stream: str,
        sample_ids: Sequence[str],
        *,
        deadline_seconds: float | None = None,
        skip_unknown: bool = False,
    ) -> list[sample_pb2.Sample]:
        """Envelopes and payloads in the requested order, with large columns. `Sample.unpack` opens and checks one."""
        end = time.monotonic() + (self._deadline_seconds if deadline_seconds is None else deadline_seconds)
        samples: list[sample_pb2.Sample] = []
        for first in range(0, len(sample_ids), _FETCH_AT_ONCE):
            wanted = sample_ids[first : first + _FETCH_AT_ONCE]
            samples += await self._fetch_some(stream, wanted, end, skip_unknown=skip_unknown)
        return [await self._whole(sample, end - time.monotonic()) for sample in samples]

    async def fetch_stored(self, stream: str, sample_ids: Sequence[str]) -> list[sample_pb2.Sample]:
        """Envelopes and payloads as the ledger stores them: large columns are named in the envelope and not fetched."""
        end = time.monotonic() + self._deadline_seconds
        return await self._fetch_some(stream, sample_ids, end, skip_unknown=False)

    async def _fetch_some(
        self, stream: str, sample_ids: Sequence[str], end: float, *, skip_unknown: bool
    ) -> list[sample_pb2.Sample]:
        found: dict[str, sample_pb2.Sample] = {}

        async def receive_missing(left_seconds: float) -> None:
            if not (missing := [sample_id for sample_id in sample_ids if sample_id not in found]):
                return
            request = pb.FetchSamplesRequest(stream=stream, sample_ids=missing, skip_unknown=skip_unknown)
            fetch = self._stub.FetchSamples
            async for reply in rpc.stream(fetch, request, deadline_seconds=left_seconds, peer=self._peer):
                found.update((sample.envelope.sample_id, sample) for sample in reply.samples)

        await retry_until(end, receive_missing)
        return [found[sample_id] for sample_id in sample_ids if sample_id in found]

    # Large columns

    async def upload_column(self, column: LargeColumn) -> None:
        """Returns when the column is durable. Puts do this for every column of a MiB or more.

        It is sent in pieces, from the offset that the buffer already has.
        """
        view, offset, data = memoryview(column.data), 0, b""
        while True:
            request = pb.UploadColumnRequest(sha256=column.sha256, num_bytes=len(view), offset=offset, data=data)
            reply = await self._call(self._stub.UploadColumn, request)
            if reply.complete:
                return
            offset = reply.next_offset
            data = bytes(view[offset : offset + _PIECE_BYTES])

    async def fetch_column(self, column: sample_pb2.OutOfLineColumn, *, deadline_seconds: float | None = None) -> bytes:
        """The column's bytes. It resumes after a broken connection until the deadline.

        Raises NotFound when its samples are gone, DataLoss for bytes of another SHA-256.
        """
        end = time.monotonic() + (self._deadline_seconds if deadline_seconds is None else deadline_seconds)
        data = bytearray()

        async def receive_rest(left_seconds: float) -> None:
            while len(data) < column.num_bytes:
                request = pb.FetchColumnRequest(sha256=column.sha256, offset=len(data))
                async for piece in self.stream_column(request, deadline_seconds=left_seconds):
                    data.extend(piece.data)

        await retry_until(end, receive_rest)
        if hashlib.sha256(data).digest() != column.sha256:
            raise DataLoss(f"column {column.name} does not match its SHA-256: its bytes were changed on disk")
        return bytes(data)

    def stream_column(
        self, request: pb.FetchColumnRequest, *, deadline_seconds: float | None = None
    ) -> AsyncIterator[pb.FetchColumnResponse]:
        """Yields a range in pieces as they arrive."""
        return rpc.stream(self._stub.FetchColumn, request, deadline_seconds=deadline_seconds, peer=self._peer)

    async def _slim_put(self, put: pb.GroupPut) -> pb.GroupPut:
        """Uploads the put's large columns and returns it without them; itself when it has none."""
        samples = [await self._slim(sample) for sample in put.samples]
        if all(slim is sample for slim, sample in zip(samples, put.samples, strict=True)):
            return put
        slim_put = pb.GroupPut(lease_id=put.lease_id, group_id=put.group_id, outcome=put.outcome, samples=samples)
        if put.HasField("failure"):
            slim_put.failure.CopyFrom(put.failure)
        return slim_put

    async def _slim_release(self, release: pb.LeaseRelease) -> pb.LeaseRelease:
        samples = [await self._slim(sample) for sample in release.partial_samples]
        return pb.LeaseRelease(lease_id=release.lease_id, partial_samples=samples, reason=release.reason)

    async def _slim(self, sample: sample_pb2.Sample) -> sample_pb2.Sample:
        slim, columns = taken_out(sample)
        for column in columns:
            await self.upload_column(column)
        return slim

    async def _whole(self, sample: sample_pb2.Sample, deadline_seconds: float) -> sample_pb2.Sample:
        columns = sample.envelope.out_of_line
        if not columns:
            return sample
        data = {c.sha256: await self.fetch_column(c, deadline_seconds=deadline_seconds) for c in columns}
        return put_back(sample, data)

    async def consume(self, stream: str, epoch: int, step: int, digest: bytes) -> int:
        """Records that the step has used its batch; returns the next step."""
        request = pb.ConsumeBatchRequest(stream=stream, epoch=epoch, step=step, digest=digest)
        reply = await self._call_of_stream(self._stub.ConsumeBatch, request)
        return reply.next_step

    async def commit(self, stream: str, epoch: int, step: int) -> int:
        """Records that a checkpoint holds every step below `step`; returns the number of groups committed."""
        request = pb.CommitStepRequest(stream=stream, epoch=epoch, step=step)
        reply = await self._call_of_stream(self._stub.CommitStep, request)
        return reply.num_groups

    async def set_policy_version(self, stream: str, epoch: int, policy_version: int) -> int:
        """Records the version that the engines serve; returns the number of groups that expired by it."""
        request = pb.SetPolicyVersionRequest(stream=stream, epoch=epoch, policy_version=policy_version)
        reply = await self._call_of_stream(self._stub.SetPolicyVersion, request)
        return reply.num_expired

    # Readers

    async def watch(
        self, stream: str, from_position: int = 0, *, deadline_seconds: float | None = None
    ) -> AsyncGenerator[pb.LedgerEvent]:
        """The stream's history from a position on, then live, to the deadline, also over restarts of the buffer."""
        request = pb.WatchRequest(stream=stream, from_position=from_position)
        ask = partial(rpc.stream, self._stub.Watch, request, peer=self._peer)
        async for reply in resumed(self._channel, ask, deadline_seconds=deadline_seconds):
            for event in reply.events:
                request.from_position = event.position + 1
                yield event

    async def list_groups(
        self,
        stream: str,
        states: Sequence[pb.GroupState.ValueType] = (),
        *,
        page_size: int = 0,
        page_token: str = "",
        group_ids: Sequence[str] = (),
    ) -> pb.ListGroupsResponse:
        """One page, newest change first; with `group_ids` all of those groups."""
        request = pb.ListGroupsRequest(
            stream=stream, states=states, page_size=page_size, page_token=page_token, group_ids=group_ids
        )
        reply = await self._call(self._stub.ListGroups, request)
        while group_ids and reply.next_page_token:
            request.page_token = reply.next_page_token
            page = await self._call(self._stub.ListGroups, request)
            reply.groups.extend(page.groups)
            reply.next_page_token = page.next_page_token
        return reply

    async def stats(self, stream: str) -> pb.StreamStats:
        """Counts of one stream."""
        reply = await self._call(self._stub.GetStats, pb.GetStatsRequest(stream=stream))
        return reply.streams[0]

    async def damage(self) -> Sequence[pb.Damage]:
        """Records and payloads that the ledger's disk has lost or changed; at most the first thousand."""
        reply = await self._call(self._stub.GetStats, pb.GetStatsRequest())
        return reply.damaged

    def backup(self, *, deadline_seconds: float | None = None) -> AsyncIterator[pb.BackupResponse]:
        """Yields a copy of the whole ledger in pieces, with its summary last. `headrace buffer backup` writes it."""
        return rpc.stream(self._stub.Backup, pb.BackupRequest(), deadline_seconds=deadline_seconds, peer=self._peer)

    async def position(self) -> int:
        """Position of the latest event in the whole ledger."""
        reply = await self._call(self._stub.GetStats, pb.GetStatsRequest())
        return reply.position

    async def _call(self, method: Callable[..., Awaitable[_Answer]], request: Message) -> _Answer:
        return await rpc.call(method, request, deadline_seconds=self._deadline_seconds, peer=self._peer)

    async def _call_of_stream(self, method: Callable[..., Awaitable[_Answer]], request: _OfStream) -> _Answer:
        async with self._of_stream(request):
            return await self._call(method, request)

    @asynccontextmanager
    async def _of_stream(self, request: _OfStream) -> AsyncIterator[None]:
        """Names the request's stream by its id, too. Where it is not there any more, the next call asks who it is."""
        request.stream_id = await self._stream_id(request.stream)
        try:
            yield
        except (Fenced, NotFound, FailedPrecondition) as error:
            if error.reason in ("FENCED", "NOT_FOUND", "OTHER_LEDGER"):
                self._stream_ids.pop(request.stream, None)
            raise

    async def _stream_id(self, stream: str) -> str:
        """Empty where the buffer is of a release without such ids. Raises NotFound."""
        if stream not in self._stream_ids:
            self._stream_ids[stream] = (await self.stats(stream)).stream_id
        return self._stream_ids[stream]

    async def _wait(
        self,
        awaited: Hashable,
        method: Callable[..., Awaitable[_Answer]],
        request: pb.LeaseGroupsRequest | pb.LeaseBatchRequest,
    ) -> _Answer:
        async def ask(wait_seconds: float, deadline_seconds: float) -> _Answer:
            request.wait_seconds = wait_seconds
            return await rpc.call(method, request, deadline_seconds=deadline_seconds + wait_seconds, peer=self._peer)

        return await self._waits.ask(awaited, ask, request.wait_seconds, self._deadline_seconds)
