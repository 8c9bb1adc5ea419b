"""BufferService: protos in, protos out, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import DataLoss, NotFound
from headrace.limits import (
    MAX_BATCH_ANSWER_BYTES,
    MAX_COLUMN_BYTES,
    MAX_COUNTER,
    MAX_DROPS_PER_CALL,
    MAX_GROUPS_PER_LEASE,
    MAX_ID_CHARACTERS,
    MAX_LEASES_PER_CALL,
    MAX_PAGE_SIZE,
    MAX_PROMPTS_PER_CALL,
    MAX_PUT_REQUEST_BYTES,
    MAX_PUT_SAMPLES_PER_CALL,
    MAX_PUTS_PER_CALL,
    MAX_RELEASE_REQUEST_BYTES,
    MAX_RELEASES_PER_CALL,
    MAX_RETRIES_PER_CALL,
    MAX_SAMPLES_PER_FETCH,
    MAX_SUBMIT_REQUEST_BYTES,
    MAX_UPLOAD_BYTES,
    MAX_WAIT_SECONDS,
    cut_text,
    require_at_most,
    require_bytes,
    require_counter,
    require_finite,
    require_id,
    require_some,
)
from headrace.protobuf import RawPut
from headrace.rpc.interceptor import seconds_left
from headrace.rpc.log import log
from services.buffer import wire
from services.buffer.blocking import paced
from services.buffer.ledger.group import Group, GroupState, cut, first_within
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.ledger import Ledger
from services.buffer.runtime.application import BufferApplication, Digest
from services.buffer.runtime.commit import now
from services.buffer.wire import batch_group_bytes, require_sha256, sample_bytes

DEFAULT_PAGE_SIZE = 100
REQUEST_BYTES = {
    "SubmitPrompts": MAX_SUBMIT_REQUEST_BYTES,
    "ReleaseLeases": MAX_RELEASE_REQUEST_BYTES,
    "PutGroups": MAX_PUT_REQUEST_BYTES,
}
WAITING = frozenset({"LeaseGroups", "LeaseBatch", "Watch"})
"""Methods whose calls mostly wait for something to happen."""
MAX_DAMAGES_LISTED = 1_000
_ANSWER_MARGIN_SECONDS = 0.25

Context = grpc.aio.ServicerContext[Any, Any]
_OfStream = pb.RetryGroupsRequest | pb.DropGroupsRequest | pb.ConsumeBatchRequest


class BufferServicer(buffer_pb2_grpc.BufferServiceServicer):
    """Every method's contract is in the proto. Registered by `wire.add_to_server`."""

    def __init__(self, buffer: BufferApplication) -> None:
        self._buffer = buffer
        self._ledger = buffer.ledger

    async def CreateStream(self, request: pb.CreateStreamRequest, context: Context) -> pb.CreateStreamResponse:
        config, created = await self._buffer.create_stream_of_client(wire.config_from_proto(request.config))
        stream_id = self._ledger.stream_id(config.name)
        return pb.CreateStreamResponse(config=wire.config_to_proto(config), created=created, stream_id=stream_id)

    async def DeleteStream(self, request: pb.DeleteStreamRequest, context: Context) -> pb.DeleteStreamResponse:
        stream = require_id(request.stream, "stream")
        stream_id = _stream_id(request.stream_id)
        deleted = await self._buffer.delete_stream(stream, force=request.force, stream_id=stream_id)
        return pb.DeleteStreamResponse(deleted=deleted)

    async def ListStreams(self, request: pb.ListStreamsRequest, context: Context) -> pb.ListStreamsResponse:
        await self._buffer.wait_until_durable()
        configs = [wire.config_to_proto(stream.state.config) async for stream in paced(self._streams(""))]
        return pb.ListStreamsResponse(streams=configs)

    async def SubmitPrompts(self, request: pb.SubmitPromptsRequest, context: Context) -> pb.SubmitPromptsResponse:
        require_some(len(request.prompts), "prompts")
        require_at_most(len(request.prompts), MAX_PROMPTS_PER_CALL, "prompts")
        prompts = [wire.prompt_from_proto(prompt, i) async for i, prompt in paced(enumerate(request.prompts))]
        stream_id = _stream_id(request.stream_id)
        return pb.SubmitPromptsResponse(
            group_ids=await self._buffer.submit(request.stream, prompts, stream_id=stream_id)
        )

    async def LeaseGroups(self, request: pb.LeaseGroupsRequest, context: Context) -> pb.LeaseGroupsResponse:
        require_some(request.max_groups, "max_groups")
        groups, reason = await self._buffer.lease(
            request.stream,
            require_id(request.producer_id, "producer_id"),
            require_id(request.request_id, "request_id"),
            min(request.max_groups, MAX_GROUPS_PER_LEASE),
            _wait_seconds(request.wait_seconds, context),
            request.oldest_version if request.HasField("oldest_version") else MAX_COUNTER,
            stream_id=_stream_id(request.stream_id),
        )
        found = [await self._lease(group) async for group in paced(groups)]
        leases = [lease for lease in found if lease is not None]
        return wire.leases_to_proto(leases, reason, self._ledger.stream(request.stream).oldest_wanted())

    async def _lease(self, group: Group) -> pb.GroupLease | None:
        """None when the lease has ended since: an operator dropped the group, say, or deleted its stream."""
        partials = await self._partials(group) if group.partials else []
        seconds = self._ledger.lease_seconds_left(now(), group.live_lease.lease_id)
        if seconds is None:
            return None
        n_samples = self._ledger.stream(group.stream).state.config.n_samples_per_prompt
        return wire.lease_to_proto(group, seconds, n_samples, partials)

    async def _partials(self, group: Group) -> list[sample_pb2.Sample]:
        """None of them when one cannot be read: its group is generated from the start then."""
        try:
            payloads = await self._buffer.payloads(group.partials)
        except (DataLoss, NotFound) as error:
            log.warning("partial_samples_not_read", group_id=group.group_id, error=error.message)
            return []
        return [wire.sample_to_proto(r, p) for r, p in zip(group.partials, payloads, strict=True)]

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:
        require_at_most(len(request.lease_ids), MAX_LEASES_PER_CALL, "lease_ids")
        for lease_id in request.lease_ids:
            require_bytes(len(lease_id), MAX_ID_CHARACTERS, "lease_ids")
        renewed, lost = self._ledger.renew(now(), request.lease_ids)
        return pb.RenewLeasesResponse(renewed=renewed, lost=lost)

    async def ReleaseLeases(self, request: pb.ReleaseLeasesRequest, context: Context) -> pb.ReleaseLeasesResponse:
        require_some(len(request.releases), "releases")
        require_at_most(len(request.releases), MAX_RELEASES_PER_CALL, "releases")
        num_samples = sum(len(release.partial_samples) for release in request.releases)
        require_at_most(num_samples, MAX_PUT_SAMPLES_PER_CALL, "releases.partial_samples")
        await self._buffer.release([await wire.release_from_proto(one) async for one in paced(request.releases)])
        return pb.ReleaseLeasesResponse()

    async def RetryGroups(self, request: pb.RetryGroupsRequest, context: Context) -> pb.RetryGroupsResponse:
        require_at_most(len(request.group_ids), MAX_RETRIES_PER_CALL, "group_ids")
        request_id = require_id(request.request_id, "request_id")
        retried = await self._buffer.commit(Ledger.retry, self._stream(request), request_id, request.group_ids)
        return pb.RetryGroupsResponse(num_groups=retried.num_groups, num_failed=retried.num_failed)

    async def DropGroups(self, request: pb.DropGroupsRequest, context: Context) -> pb.DropGroupsResponse:
        require_some(len(request.group_ids), "group_ids")
        require_at_most(len(request.group_ids), MAX_DROPS_PER_CALL, "group_ids")
        group_ids = [require_id(group_id, "group_ids") for group_id in request.group_ids]
        require_some(len(request.reason), "reason")
        request_id = require_id(request.request_id, "request_id")
        reason = cut_text(request.reason)
        dropped = await self._buffer.commit(Ledger.drop, self._stream(request), request_id, group_ids, reason)
        return pb.DropGroupsResponse(num_groups=dropped.num_groups, num_batches=dropped.num_batches)

    async def PutGroups(self, request: Sequence[RawPut], context: Context) -> pb.PutGroupsResponse:  # type: ignore[override]  # raw puts
        require_some(len(request), "groups")
        require_at_most(len(request), MAX_PUTS_PER_CALL, "groups")
        require_at_most(sum(len(put.samples) for put in request), MAX_PUT_SAMPLES_PER_CALL, "groups.samples")
        config_of = self._ledger.config_of
        puts = [await wire.put_from_proto(put, config_of(put.rest.group_id)) async for put in paced(request)]
        results = await self._buffer.put(puts)
        return pb.PutGroupsResponse(results=[wire.put_result_to_proto(result) for result in results])

    async def LeaseBatch(self, request: pb.LeaseBatchRequest, context: Context) -> bytes:  # type: ignore[override]  # as bytes
        wait_seconds = _wait_seconds(request.wait_seconds, context)
        batch, num_ready = await self._buffer.lease_batch(
            request.stream, request.epoch, request.step, wait_seconds, stream_id=_stream_id(request.stream_id)
        )
        if batch is None:
            return pb.LeaseBatchResponse(ready=False, groups_ready=num_ready).SerializeToString()
        rest = batch.groups[request.first_group :]
        groups = first_within(rest, lambda group: group.answer_bytes, MAX_BATCH_ANSWER_BYTES)
        head = pb.LeaseBatchResponse(ready=True, digest=batch.digest, groups_ready=num_ready)
        head.next_group = request.first_group + len(groups) if len(groups) < len(rest) else 0
        parts = [batch_group_bytes(g.group_id, (r.envelope for r in g.samples)) async for g in paced(groups)]
        return b"".join((head.SerializeToString(), *parts))

    async def FetchSamples(self, request: pb.FetchSamplesRequest, context: Context) -> AsyncIterator[bytes]:  # type: ignore[override]  # as bytes
        require_some(len(request.sample_ids), "sample_ids")
        require_at_most(len(request.sample_ids), MAX_SAMPLES_PER_FETCH, "sample_ids")
        async for chunk in self._buffer.fetch(request.stream, request.sample_ids, skip_unknown=request.skip_unknown):
            yield b"".join(part for record, payload in chunk for part in sample_bytes(record, payload))

    async def ConsumeBatch(self, request: pb.ConsumeBatchRequest, context: Context) -> pb.ConsumeBatchResponse:
        next_step = await self._buffer.commit(
            Ledger.consume, self._stream(request), request.epoch, request.step, request.digest
        )
        return pb.ConsumeBatchResponse(next_step=next_step)

    async def CommitStep(self, request: pb.CommitStepRequest, context: Context) -> pb.CommitStepResponse:
        require_counter(request.step, "step")
        stream_id = _stream_id(request.stream_id)
        num_groups = await self._buffer.commit_step(request.stream, request.epoch, request.step, stream_id=stream_id)
        return pb.CommitStepResponse(num_groups=num_groups)

    async def Rewind(self, request: pb.RewindRequest, context: Context) -> pb.RewindResponse:
        step = require_counter(request.step, "step")
        request_id = require_id(request.request_id, "request_id")
        least_epoch = require_counter(request.least_epoch, "least_epoch")
        stream_id = _stream_id(request.stream_id)
        epoch, num_groups = await self._buffer.rewind(
            request.stream, step, request_id, least_epoch, stream_id=stream_id
        )
        return pb.RewindResponse(epoch=epoch, num_groups=num_groups)

    async def SetPolicyVersion(
        self, request: pb.SetPolicyVersionRequest, context: Context
    ) -> pb.SetPolicyVersionResponse:
        require_counter(request.policy_version, "policy_version")
        num_expired = await self._buffer.set_policy_version(
            request.stream, request.epoch, request.policy_version, stream_id=_stream_id(request.stream_id)
        )
        return pb.SetPolicyVersionResponse(num_expired=num_expired)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        self._streams(request.stream)
        async for page in self._buffer.events.watch(request.from_position):
            events = [wire.event_to_proto(e) for e in page if not request.stream or e.stream == request.stream]
            for some in cut(events, lambda event: event.ByteSize()):
                yield pb.WatchResponse(events=some)
                del some  # nor is it kept, nor the page, while the next is waited for
            del page, events

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Context) -> bytes:  # type: ignore[override]  # as bytes
        states = wire.states_from_proto(request.states)
        before = wire.page_token_from_proto(request.page_token)
        require_at_most(len(request.group_ids), MAX_PAGE_SIZE, "group_ids")
        if request.group_ids:
            groups, following = self._groups(request.stream, request.group_ids, states, before), None
        else:
            count = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
            groups, following = self._ledger.list_groups(request.stream, states, before, count)
        await self._buffer.wait_until_durable()
        page = first_within(groups, lambda group: group.answer_bytes)
        if len(page) < len(groups):
            following = page[-1].position
        tail = pb.ListGroupsResponse(next_page_token="" if following is None else str(following))
        return b"".join([*[wire.group_to_proto(group) async for group in paced(page)], tail.SerializeToString()])

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        await self._buffer.wait_until_durable()
        streams = [self._stats(stream) async for stream in paced(self._streams(request.stream))]
        damage = self._buffer.damage()
        return pb.GetStatsResponse(
            streams=streams,
            position=self._buffer.journal.durable_position,
            num_damaged=len(damage),
            damaged=[wire.damage_to_proto(one) for one in damage[:MAX_DAMAGES_LISTED]],
        )

    async def UploadColumn(self, request: pb.UploadColumnRequest, context: Context) -> pb.UploadColumnResponse:
        sha256 = require_sha256(request.sha256, "sha256")
        require_bytes(request.num_bytes, MAX_COLUMN_BYTES, "num_bytes")
        require_bytes(request.offset, request.num_bytes, "offset")
        require_bytes(len(request.data), MAX_UPLOAD_BYTES, "data")
        next_offset, complete = await self._buffer.upload_column(
            sha256, request.num_bytes, request.offset, request.data
        )
        return pb.UploadColumnResponse(next_offset=next_offset, complete=complete)

    async def FetchColumn(
        self, request: pb.FetchColumnRequest, context: Context
    ) -> AsyncIterator[pb.FetchColumnResponse]:
        sha256 = require_sha256(request.sha256, "sha256")
        require_bytes(request.offset, MAX_COLUMN_BYTES, "offset")
        async for offset, data in self._buffer.columns.read(sha256, request.offset, request.num_bytes or None):
            yield pb.FetchColumnResponse(offset=offset, data=data)

    async def Backup(self, request: pb.BackupRequest, context: Context) -> AsyncIterator[pb.BackupResponse]:
        summary = pb.BackupSummary(store=self._buffer.store_name, position=self._buffer.journal.durable_position)
        async for part in self._buffer.backup():
            if isinstance(part, Digest):
                summary.files.add(name=part.file, num_bytes=part.num_bytes, sha256=part.sha256)
            else:
                yield pb.BackupResponse(chunk=pb.BackupChunk(file=part.file, offset=part.offset, data=part.data))
        yield pb.BackupResponse(summary=summary)

    def _streams(self, stream: str) -> list[IndexedStream]:
        streams = self._ledger.streams
        return [self._ledger.stream(stream)] if stream else [streams[name] for name in sorted(streams)]

    def _groups(
        self, stream: str, group_ids: Sequence[str], states: Sequence[GroupState], before: int | None
    ) -> list[Group]:
        known = self._ledger.stream(stream).groups
        found = [known[group_id] for group_id in dict.fromkeys(group_ids) if group_id in known]
        wanted = [group for group in found if not states or group.state in states]
        wanted = [group for group in wanted if before is None or group.position < before]
        return sorted(wanted, key=lambda group: -group.position)

    def _stats(self, stream: IndexedStream) -> pb.StreamStats:
        stats = wire.stats_to_proto(stream)
        stats.trouble = self._buffer.sources.trouble_of(stream.state.name) or ""
        stats.stream_id = self._ledger.stream_id(stream.state.name)
        return stats

    def _stream(self, request: _OfStream) -> str:
        """The request's stream. Raises Fenced when the stream of its id was deleted; nothing may be awaited since."""
        self._ledger.require_same(request.stream, _stream_id(request.stream_id))
        return request.stream


def _stream_id(sent: str) -> str | None:
    return require_id(sent, "stream_id") if sent else None


def _wait_seconds(asked: float, context: Context) -> float:
    """Shortens the wait so that an empty answer arrives before the call's deadline."""
    require_finite(asked, "wait_seconds")
    return max(min(asked, MAX_WAIT_SECONDS, seconds_left(context) - _ANSWER_MARGIN_SECONDS), 0.0)
