"""The promises of BufferService that a producer and a trainer rely on. Each check has a stream of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.conformance.checks import Check, ask, refused, require, require_serving
from headrace.errors import AlreadyExists
from headrace.trajectory import PolicyRange, Sample, Status

SERVICE = pb.DESCRIPTOR.services_by_name["BufferService"].full_name
_SAMPLES, _GROUPS = 2, 2
"""Of a prompt, and of a step."""
_WAIT_SECONDS = 30.0
_SHORT_LEASE_SECONDS = 0.5


@dataclass(frozen=True)
class BufferSubject:
    channel: Any

    @property
    def stub(self) -> Any:
        return buffer_pb2_grpc.BufferServiceStub(self.channel)

    @asynccontextmanager
    async def stream(self, prompts: int = 0, **changes: Any) -> AsyncIterator[_Stream]:
        """A new stream of two samples a prompt and two groups a step, which is deleted in the end."""
        fields = {"n_samples_per_prompt": _SAMPLES, "groups_per_step": _GROUPS, "max_staleness": 1, **changes}
        config = pb.StreamConfig(name=f"conformance-{uuid.uuid4().hex[:12]}", **fields)
        await ask(self.stub.CreateStream, pb.CreateStreamRequest(config=config))
        stream = _Stream(self.stub, config)
        try:
            if prompts:
                await stream.submit(*(f"p{number}" for number in range(prompts)))
            yield stream
        finally:
            await ask(self.stub.DeleteStream, pb.DeleteStreamRequest(stream=config.name, force=True))


@dataclass(frozen=True)
class _Stream:
    """Calls about one stream."""

    stub: Any
    config: pb.StreamConfig

    @property
    def name(self) -> str:
        return self.config.name

    async def submit(self, *names: str) -> Sequence[str]:
        prompts = [sample_pb2.Prompt(prompt_id=name, text=f"What is {name}?") for name in names]
        request = pb.SubmitPromptsRequest(stream=self.name, prompts=prompts)
        group_ids: Sequence[str] = (await ask(self.stub.SubmitPrompts, request)).group_ids
        return group_ids

    async def lease(self, number: int, *, wait_seconds: float = 0.0, request_id: str = "") -> pb.LeaseGroupsResponse:
        request = pb.LeaseGroupsRequest(
            stream=self.name,
            producer_id="conformance",
            request_id=request_id or uuid.uuid4().hex,
            max_groups=number,
            wait_seconds=wait_seconds,
        )
        return await ask(self.stub.LeaseGroups, request)

    async def put(self, *puts: pb.GroupPut) -> Sequence[pb.PutResult]:
        results: Sequence[pb.PutResult] = (await ask(self.stub.PutGroups, pb.PutGroupsRequest(groups=puts))).results
        return results

    async def rewind(self, step: int) -> int:
        """Returns the new epoch."""
        request = pb.RewindRequest(stream=self.name, step=step, request_id=uuid.uuid4().hex)
        return int((await ask(self.stub.Rewind, request)).epoch)

    async def batch(self, epoch: int, step: int, *, wait_seconds: float = _WAIT_SECONDS) -> pb.LeaseBatchResponse:
        request = pb.LeaseBatchRequest(stream=self.name, epoch=epoch, step=step, wait_seconds=wait_seconds)
        return await ask(self.stub.LeaseBatch, request)

    async def consume(self, epoch: int, step: int, digest: bytes) -> int:
        request = pb.ConsumeBatchRequest(stream=self.name, epoch=epoch, step=step, digest=digest)
        return int((await ask(self.stub.ConsumeBatch, request)).next_step)

    async def commit(self, epoch: int, step: int) -> None:
        await ask(self.stub.CommitStep, pb.CommitStepRequest(stream=self.name, epoch=epoch, step=step))

    async def stats(self) -> pb.StreamStats:
        reply: pb.GetStatsResponse = await ask(self.stub.GetStats, pb.GetStatsRequest(stream=self.name))
        return reply.streams[0]

    async def answered(self, number: int) -> list[pb.GroupPut]:
        """Leases so many groups and puts them; returns what was put."""
        puts = [complete_put(lease) for lease in (await self.lease(number, wait_seconds=_WAIT_SECONDS)).leases]
        require(len(puts) == number, f"{len(puts)} groups were leased, not {number}")
        for result in await self.put(*puts):
            require(not result.HasField("refused"), f"a put was refused: {result.refused.reason}")
        return puts


def completed_sample(lease: pb.GroupLease, index: int, policy_version: int, reward: float = 1.0) -> Sample:
    """Five tokens, two of them the response."""
    return Sample(
        sample_id=f"{lease.lease_id}/{index}",
        group_id=lease.group_id,
        index=index,
        prompt=lease.prompt.text,
        response="ok",
        tokens=np.array([1, 2, 3, 10 + index, 5], np.int32),
        loss_mask=np.ones(2, np.uint8),
        rollout_log_probs=np.zeros(2, np.float32),
        status=Status.COMPLETED,
        reward=reward,
        policy_ranges=[PolicyRange(policy_version, 0, 2)],
    )


def complete_put(lease: pb.GroupLease, policy_version: int | None = None, *, reward: float = 1.0) -> pb.GroupPut:
    """All samples of a lease, by its own policy version unless another one is given."""
    version = lease.policy_version if policy_version is None else policy_version
    samples = [completed_sample(lease, index, version, reward).pack() for index in range(lease.n_samples)]
    return pb.GroupPut(
        lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=samples
    )


async def serves(subject: BufferSubject) -> None:
    """Its health is SERVING, under the name of the service."""
    await require_serving(subject.channel, SERVICE)


async def a_stream_has_one_config(subject: BufferSubject) -> None:
    """CreateStream may be repeated; with another config it is ALREADY_EXISTS."""
    async with subject.stream() as stream:
        again = await ask(subject.stub.CreateStream, pb.CreateStreamRequest(config=stream.config))
        require(not again.created, "the second CreateStream says that it created the stream")
        other = pb.StreamConfig()
        other.CopyFrom(stream.config)
        other.groups_per_step = _GROUPS + 1
        with refused("another config", "ALREADY_EXISTS"):
            await ask(subject.stub.CreateStream, pb.CreateStreamRequest(config=other))


async def an_unknown_stream_is_not_found(subject: BufferSubject) -> None:
    """A call about a stream that does not exist is NOT_FOUND."""
    config = pb.StreamConfig(name=f"conformance-{uuid.uuid4().hex[:12]}")
    with refused("a lease of an unknown stream", "NOT_FOUND"):
        await _Stream(subject.stub, config).lease(1)


async def a_prompt_is_submitted_once(subject: BufferSubject) -> None:
    """A prompt that is submitted again, under the same id, is the same group."""
    async with subject.stream() as stream:
        first, second = await stream.submit("a", "b"), await stream.submit("a", "b")
        require(list(first) == list(second), f"{list(first)}, and then {list(second)}")
        leases = (await stream.lease(4)).leases
        require(len(leases) == _GROUPS, f"{len(leases)} groups came of two prompts")


async def a_live_lease_is_exclusive(subject: BufferSubject) -> None:
    """A leased group is given to nobody else while its lease lives."""
    async with subject.stream(prompts=2) as stream:
        leases = (await stream.lease(2)).leases
        more = (await stream.lease(2)).leases
        require(len(leases) == 2, f"{len(leases)} of two groups were leased")
        require(not more, "a leased group was leased again")


async def a_lease_may_be_asked_for_again(subject: BufferSubject) -> None:
    """LeaseGroups with the same request id has the same leases: a caller may retry it."""
    async with subject.stream(prompts=2) as stream:
        first, second = [(await stream.lease(1, request_id="same")).leases for _ in range(2)]
        ids = [[lease.lease_id for lease in leases] for leases in (first, second)]
        require(ids[0] == ids[1], f"leases {ids[0]}, and then {ids[1]}")


async def an_expired_lease_is_lost(subject: BufferSubject) -> None:
    """A lease that is not renewed ends. Its group is leased again, and the late put is refused with LEASE_LOST."""
    async with subject.stream(prompts=1, lease_seconds=_SHORT_LEASE_SECONDS) as stream:
        (first,) = (await stream.lease(1)).leases
        second = (await stream.lease(1, wait_seconds=_WAIT_SECONDS)).leases
        require([each.group_id for each in second] == [first.group_id], "the group was not leased again")
        (late,) = await stream.put(complete_put(first))
        require(late.refused.reason == "LEASE_LOST", f"the late put has {late.refused.reason or 'no refusal'}")


async def a_released_group_is_leased_again(subject: BufferSubject) -> None:
    """A released lease gives its group back at once."""
    async with subject.stream(prompts=1) as stream:
        (first,) = (await stream.lease(1)).leases
        release = pb.LeaseRelease(lease_id=first.lease_id, reason="conformance")
        await ask(subject.stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=[release]))
        (second,) = (await stream.lease(1, wait_seconds=_WAIT_SECONDS)).leases
        require(second.group_id == first.group_id, "another group was leased")


async def a_put_may_be_repeated(subject: BufferSubject) -> None:
    """A put that is repeated is a duplicate; with other samples under the same ids it is ALREADY_EXISTS."""
    async with subject.stream(prompts=1) as stream:
        (lease,) = (await stream.lease(1)).leases
        (first,) = await stream.put(complete_put(lease))
        (second,) = await stream.put(complete_put(lease))
        require((first.duplicate, second.duplicate) == (False, True), f"{first.duplicate}, then {second.duplicate}")
        with refused("a put of other samples with known ids", "ALREADY_EXISTS"):
            (third,) = await stream.put(complete_put(lease, reward=0.5))
            if third.HasField("refused"):
                raise AlreadyExists(third.refused.message)


async def a_damaged_sample_is_refused(subject: BufferSubject) -> None:
    """A payload that does not have its digest is DATA_LOSS, and nothing of the call is stored."""
    async with subject.stream(prompts=2) as stream:
        good, bad = [complete_put(lease) for lease in (await stream.lease(2)).leases]
        bad.samples[0].payload += b"x"
        with refused("a damaged payload", "DATA_LOSS", "INVALID_ARGUMENT"):
            await stream.put(good, bad)
        ready = (await stream.stats()).groups.get("READY", 0)
        require(ready == 0, f"{ready} groups of the refused call were stored")


async def admission_is_bounded(subject: BufferSubject) -> None:
    """With max_staleness k, at most (k + 1) steps of groups are given out before the first one is consumed."""
    async with subject.stream(prompts=12, max_staleness=1) as stream:
        leases = (await stream.lease(12)).leases
        require(len(leases) == 2 * _GROUPS, f"{len(leases)} groups were leased, not {2 * _GROUPS}")
        reply = await stream.lease(1)
        reason = pb.NoLeaseReason.Name(reply.no_lease_reason)
        require(reply.no_lease_reason == pb.NO_LEASE_REASON_ADMISSION, f"the reason of no lease is {reason}")


async def a_batch_is_the_same_again(subject: BufferSubject) -> None:
    """LeaseBatch of an epoch and a step is the same batch in the same order, however often it is asked."""
    async with subject.stream(prompts=4) as stream:
        epoch = await stream.rewind(0)
        await stream.answered(4)
        first, second = [await stream.batch(epoch, 0) for _ in range(2)]
        require(first.ready, "the batch is not ready")
        require(first == second, "the second batch differs from the first")
        require(len(first.groups) == _GROUPS, f"the batch has {len(first.groups)} groups, not {_GROUPS}")


async def samples_come_back_as_they_were_put(subject: BufferSubject) -> None:
    """FetchSamples returns each payload byte for byte."""
    async with subject.stream(prompts=2) as stream:
        epoch = await stream.rewind(0)
        put = {each.envelope.sample_id: each for group in await stream.answered(2) for each in group.samples}
        batch = await stream.batch(epoch, 0)
        ids = [envelope.sample_id for group in batch.groups for envelope in group.samples]
        request = pb.FetchSamplesRequest(stream=stream.name, sample_ids=ids)
        fetched: list[sample_pb2.Sample] = []
        async for reply in subject.stub.FetchSamples(request, timeout=_WAIT_SECONDS):
            fetched += reply.samples
        require([each.envelope.sample_id for each in fetched] == ids, "other samples, or in another order")
        changed = [each.envelope.sample_id for each in fetched if each.payload != put[each.envelope.sample_id].payload]
        require(not changed, f"changed payloads: {', '.join(changed)}")


async def steps_are_consumed_in_order(subject: BufferSubject) -> None:
    """ConsumeBatch may be repeated; with another digest, or for a later step, it is refused."""
    async with subject.stream(prompts=4) as stream:
        epoch = await stream.rewind(0)
        await stream.answered(4)
        batch = await stream.batch(epoch, 0)
        statuses = ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE", "ABORTED", "ALREADY_EXISTS")
        with refused("a consume with another digest", *statuses):
            await stream.consume(epoch, 0, b"\x00" * len(batch.digest))
        steps = [await stream.consume(epoch, 0, batch.digest) for _ in range(2)]
        require(steps == [1, 1], f"the next steps are {steps}")
        with refused("a consume of step 5", *statuses):
            await stream.consume(epoch, 5, batch.digest)


async def consumed_is_not_committed(subject: BufferSubject) -> None:
    """Rewind gives what was consumed after the checkpoint back, as the same batch for the same step."""
    async with subject.stream(prompts=4) as stream:
        epoch = await stream.rewind(0)
        await stream.answered(4)
        batches = []
        for step in range(2):
            batches.append(await stream.batch(epoch, step))
            await stream.consume(epoch, step, batches[-1].digest)
        await stream.commit(epoch, 1)
        later = await stream.rewind(1)
        again = await stream.batch(later, 1)
        ids = [[group.group_id for group in each.groups] for each in (batches[1], again)]
        require(ids[0] == ids[1], f"step 1 had the groups {ids[0]}, and after Rewind {ids[1]}")
        require((await stream.stats()).groups.get("COMMITTED", _GROUPS) <= _GROUPS, "step 1 is committed, too")


async def an_older_epoch_is_fenced(subject: BufferSubject) -> None:
    """Rewind opens a new epoch: a trainer with an older one is ABORTED."""
    async with subject.stream(prompts=2) as stream:
        old = await stream.rewind(0)
        new = await stream.rewind(0)
        require(new > old, f"epoch {old}, and then {new}")
        with refused("LeaseBatch of an older epoch", "ABORTED"):
            await stream.batch(old, 0, wait_seconds=0)


async def waiting_calls_are_woken(subject: BufferSubject) -> None:
    """A producer and a trainer that wait are answered when there is something for them."""
    async with subject.stream() as stream:
        epoch = await stream.rewind(0)
        producer = asyncio.create_task(stream.lease(2, wait_seconds=_WAIT_SECONDS))
        trainer = asyncio.create_task(stream.batch(epoch, 0))
        await stream.submit("a", "b")
        leases = list((await producer).leases)
        if len(leases) < _GROUPS:
            leases += (await stream.lease(_GROUPS - len(leases), wait_seconds=_WAIT_SECONDS)).leases
        await stream.put(*(complete_put(lease) for lease in leases))
        require((await trainer).ready, "the trainer's wait ended without the batch")


async def a_full_queue_says_when_to_come_back(subject: BufferSubject) -> None:
    """Beyond max_queued_groups prompts are refused with RESOURCE_EXHAUSTED, and none of the call is taken."""
    async with subject.stream(max_queued_groups=1) as stream:
        with refused("a second queued prompt", "RESOURCE_EXHAUSTED"):
            await stream.submit("a", "b")
        require(not (await stream.lease(1)).leases, "a prompt of the refused call was taken")


CHECKS: Sequence[Check[BufferSubject]] = (
    serves,
    a_stream_has_one_config,
    an_unknown_stream_is_not_found,
    a_prompt_is_submitted_once,
    a_live_lease_is_exclusive,
    a_lease_may_be_asked_for_again,
    an_expired_lease_is_lost,
    a_released_group_is_leased_again,
    a_put_may_be_repeated,
    a_damaged_sample_is_refused,
    admission_is_bounded,
    a_batch_is_the_same_again,
    samples_come_back_as_they_were_put,
    steps_are_consumed_in_order,
    consumed_is_not_committed,
    an_older_epoch_is_fenced,
    waiting_calls_are_woken,
    a_full_queue_says_when_to_come_back,
)
