"""Samples that must not be stored, as a producer sends them: they are refused, and nothing of their call is kept."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient, LargeColumn
from headrace.digest import digest_of
from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.limits import MAX_GROUP_ENVELOPE_BYTES, MAX_PUT_SAMPLES_PER_CALL
from headrace.rpc.client import connect
from headrace.trajectory import PolicyRange, Sample, Status
from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.buffer_samples import complete_put, completed_sample, text_prompts
from tests.support.processes.buffer_server import served_buffer
from tests.support.refusals import refused

NUM_PROMPTS = 400


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[BufferClient]:
    async with (
        served_buffer(SqliteStore(tmp_path / "ledger"), columns_folder=tmp_path / "columns") as (_, server),
        BufferClient(server.address) as client,
    ):
        for name, n_samples in (("one", 1), ("many", 4)):
            config = pb.StreamConfig(name=name, n_samples_per_prompt=n_samples, groups_per_step=1)
            await client.create_stream(config)
            await client.submit_prompts(name, text_prompts(*(f"{i}" for i in range(NUM_PROMPTS))))
        yield client


async def leased(client: BufferClient, stream: str, count: int = 1) -> list[pb.GroupLease]:
    return list((await client.lease_groups(stream, "p", count)).leases)


async def nothing_is_stored(client: BufferClient, stream: str, num_leased: int) -> None:
    counts = (await client.stats(stream)).groups
    assert (counts["LEASED"], counts["READY"]) == (num_leased, 0)


# Tokens of no version


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.TRUNCATED])
@pytest.mark.parametrize(
    ("ranges", "mask"),
    [
        ([], [1, 1]),
        ([PolicyRange(0, 1, 2)], [1, 0]),
    ],
)
async def test_a_trained_token_of_no_version_is_refused_also_in_a_response_that_was_cut(
    client: BufferClient, status: Status, ranges: list[PolicyRange], mask: list[int]
) -> None:
    (lease,) = await leased(client, "one")
    sample = replace(
        completed_sample(lease, 0, 0), status=status, policy_ranges=ranges, loss_mask=np.asarray(mask, np.uint8)
    )
    with refused(InvalidArgument, "policy_ranges", reason="BAD_SAMPLE"):
        await client.put_groups([put_of(lease, [sample])])
    await nothing_is_stored(client, "one", 1)
    masked = replace(sample, loss_mask=np.zeros(2, np.uint8))
    (result,) = await client.put_groups([put_of(lease, [masked])])
    assert result.state == pb.GROUP_STATE_READY


def put_of(lease: pb.GroupLease, samples: Sequence[Sample]) -> pb.GroupPut:
    packed = [sample.pack() for sample in samples]
    return pb.GroupPut(
        lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=packed
    )


# Columns out of line


def naming(lease: pb.GroupLease, columns: Sequence[tuple[bytes, int]]) -> sample_pb2.Sample:
    """A sample that names these columns, (bytes, the length that it says)."""
    packed = completed_sample(lease, 0, 0).pack()
    payload = sample_pb2.SamplePayload.FromString(packed.payload)
    for i, (data, num_bytes) in enumerate(columns):
        payload.columns.add(name=f"c{i}", dtype=sample_pb2.DTYPE_UINT8, shape=[num_bytes])
        packed.envelope.out_of_line.add(name=f"c{i}", sha256=hashlib.sha256(data).digest(), num_bytes=num_bytes)
    packed.payload = payload.SerializeToString()
    packed.envelope.digest, packed.envelope.payload_bytes = digest_of(packed.payload), len(packed.payload)
    return packed


async def uploaded(client: BufferClient, *columns: bytes) -> None:
    for data in columns:
        await client.upload_column(LargeColumn(hashlib.sha256(data).digest(), data))


A, B, C = b"a" * 900, b"b" * 500, b"c" * 100
SAID = {
    "fewer": [(A, 899)],
    "more": [(A, 901)],
    "the other's": [(A, 500), (B, 900)],
    "more and fewer": [(A, 901), (B, 499), (C, 100)],
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("call", ["put", "release"])
async def test_an_envelope_that_says_another_length_than_its_column_has_is_refused(
    client: BufferClient, said: str, call: str
) -> None:
    await uploaded(client, A, B, C)
    (lease,) = await leased(client, "one")
    with pytest.raises(InvalidArgument, match="bytes were uploaded|out of line"):
        await sent(client, call, lease, naming(lease, SAID[said]))
    await nothing_is_stored(client, "one", 1)
    await sent(client, call, lease, naming(lease, [(data, len(data)) for data, _ in SAID[said]]))


async def sent(client: BufferClient, call: str, lease: pb.GroupLease, sample: sample_pb2.Sample) -> None:
    if call == "put":
        put = complete_put(lease)
        put.samples[0].CopyFrom(sample)
        await client.put_groups([put])
    else:
        partial = sample_pb2.Sample.FromString(sample.SerializeToString())
        partial.envelope.status = sample_pb2.SAMPLE_STATUS_ABORTED
        await client.release_leases([pb.LeaseRelease(lease_id=lease.lease_id, partial_samples=[partial])])


@pytest.mark.parametrize("there", [(), (A, C)])
async def test_partial_samples_that_name_a_missing_column_are_refused_and_the_lease_lives_on(
    client: BufferClient, there: tuple[bytes, ...]
) -> None:
    await uploaded(client, *there)
    (lease,) = await leased(client, "one")
    partial = naming(lease, [(data, len(data)) for data in (*there, B)])
    with refused(FailedPrecondition, "UploadColumn", reason="COLUMN_MISSING"):
        await sent(client, "release", lease, partial)
    assert not (await client.renew_leases([lease.lease_id])).lost
    await uploaded(client, B)
    await sent(client, "release", lease, partial)
    (again,) = await leased(client, "one")
    assert len(again.partial_samples) == 1


# The envelopes of a call


def enveloped(lease: pb.GroupLease, index: int, num_bytes: int) -> sample_pb2.Sample:
    """Its envelope has exactly so many bytes."""
    sample = completed_sample(lease, index, 0).pack()
    envelope = sample.envelope
    while (left := num_bytes - envelope.ByteSize()) > 2_100:
        envelope.tags[f"{len(envelope.tags):02}"] = "x" * 2_000
    for length in range(max(left - 12, 0), left):
        envelope.tags["zz"] = "x" * length
        if envelope.ByteSize() == num_bytes:
            return sample
    raise AssertionError(f"no envelope has {num_bytes} bytes")


def puts_of(leases: Sequence[pb.GroupLease], n_samples: int, num_bytes: int) -> list[pb.GroupPut]:
    return [
        pb.GroupPut(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            outcome=pb.PUT_OUTCOME_COMPLETE,
            samples=[enveloped(lease, i, num_bytes) for i in range(n_samples)],
        )
        for lease in leases
    ]


async def put_bare(client: BufferClient, request: pb.PutGroupsRequest) -> grpc.StatusCode:
    """As another client would send it, in one call."""
    async with connect(client.address) as channel:
        try:
            await buffer_pb2_grpc.BufferServiceStub(channel).PutGroups(request, timeout=120)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@pytest.mark.parametrize(("stream", "num_groups", "n_samples"), [("one", 320, 1), ("many", 2, 160)])
async def test_the_envelopes_of_a_call_have_16_mib_together_however_they_are_spread(
    client: BufferClient, stream: str, num_groups: int, n_samples: int
) -> None:
    leases = await leased(client, stream, num_groups)
    num_bytes = MAX_GROUP_ENVELOPE_BYTES // (num_groups * n_samples)
    most = puts_of(leases, n_samples, num_bytes)
    above = pb.PutGroupsRequest(groups=most)
    rest = MAX_GROUP_ENVELOPE_BYTES - num_bytes * num_groups * n_samples
    above.groups[-1].samples[-1].CopyFrom(enveloped(leases[-1], n_samples - 1, num_bytes + rest + 1))
    assert await put_bare(client, above) is grpc.StatusCode.INVALID_ARGUMENT
    await nothing_is_stored(client, stream, num_groups)
    assert await put_bare(client, pb.PutGroupsRequest(groups=most)) is grpc.StatusCode.OK
    assert (await client.stats(stream)).groups["READY"] == num_groups


@pytest.mark.parametrize("call", ["put", "release"])
async def test_an_envelope_has_64_kib(client: BufferClient, call: str) -> None:
    (lease,) = await leased(client, "one")
    with refused(InvalidArgument, "envelope", reason="TOO_LARGE"):
        await sent(client, call, lease, enveloped(lease, 0, (64 << 10) + 1))
    await nothing_is_stored(client, "one", 1)
    await sent(client, call, lease, enveloped(lease, 0, 64 << 10))


@pytest.mark.parametrize("sizes", [(1_025,), (512, 513)])
async def test_a_call_has_1024_samples(client: BufferClient, sizes: tuple[int, ...]) -> None:
    leases = await leased(client, "many", len(sizes))
    puts = [put for lease, size in zip(leases, sizes, strict=True) for put in puts_of([lease], size, 400)]
    assert await put_bare(client, pb.PutGroupsRequest(groups=puts)) is grpc.StatusCode.INVALID_ARGUMENT
    releases = [pb.LeaseRelease(lease_id=put.lease_id, partial_samples=put.samples) for put in puts]
    with refused(InvalidArgument, MAX_PUT_SAMPLES_PER_CALL, reason="BATCH_TOO_LARGE"):
        await client._call(client._stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=releases))
    await nothing_is_stored(client, "many", len(sizes))


async def test_the_envelopes_of_a_groups_partial_samples_have_16_mib(client: BufferClient) -> None:
    (lease,) = await leased(client, "many")
    partials = [enveloped(lease, i, 65_536) for i in range(257)]
    release = pb.LeaseRelease(lease_id=lease.lease_id, partial_samples=partials)
    with refused(InvalidArgument, MAX_GROUP_ENVELOPE_BYTES, reason="TOO_LARGE"):
        await client._call(client._stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=[release]))
    await nothing_is_stored(client, "many", 1)


# Without a reward


@pytest.mark.parametrize("needs_reward", [True, False])
async def test_a_sample_without_a_reward_fails_alone_where_the_stream_needs_rewards(
    client: BufferClient, needs_reward: bool
) -> None:
    config = pb.StreamConfig(name="train", n_samples_per_prompt=4, groups_per_step=2, needs_reward=needs_reward)
    assert (await client.create_stream(config)).config.needs_reward == needs_reward
    await client.submit_prompts("train", text_prompts("a", "b"))
    first, second = await leased(client, "train", 2)
    ok, bare, zero, cut = (completed_sample(first, i, 0) for i in range(4))
    cut = replace(cut, reward=None, status=Status.TRUNCATED)
    put = put_of(first, [ok, replace(bare, reward=None), replace(zero, reward=0.0), cut])
    await client.put_groups([put, complete_put(second)])
    groups = {group.group_id: group for group in (await client.list_groups("train")).groups}
    envelopes, others = groups[first.group_id].samples, groups[second.group_id].samples
    failed = [False, needs_reward, False, needs_reward]
    assert [one.status == sample_pb2.SAMPLE_STATUS_FAILED for one in envelopes] == failed
    assert [one.failure.reason for one in envelopes] == ["NO_REWARD" if bad else "" for bad in failed]
    assert [one.HasField("reward") for one in envelopes] == [True, False, True, False]
    assert {one.status for one in others} == {sample_pb2.SAMPLE_STATUS_COMPLETED}
    (again,) = await client.put_groups([put])
    assert again.duplicate
