"""The limits of the buffer, attacked by stubs: what exceeds one is refused, what was kept can be sent back."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headrace import limits
from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.digest import digest_of
from headrace.errors import ResourceExhausted
from headrace.rpc.client import connect
from services.buffer import servicer
from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.buffer_samples import complete_put, completed_sample, text_prompts
from tests.support.processes.buffer_server import served_buffer
from tests.support.refusals import refused

INVALID, FAILED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
HUGE = 2**63 - 1
LONG = "x" * 100_000
Changes = tuple[dict[str, Any], ...]


def stream(**changes: Any) -> pb.StreamConfig:
    fields = {"name": "s", "n_samples_per_prompt": 1, "groups_per_step": 1, **changes}
    return pb.StreamConfig(**fields)


def prompt(**changes: Any) -> pb.SubmitPromptsRequest:
    fields = {"prompt_id": "p", "text": "t", **changes}
    return pb.SubmitPromptsRequest(stream="train", prompts=[sample_pb2.Prompt(**fields)])


def put(**envelope: Any) -> pb.PutGroupsRequest:
    fields = {"sample_id": "s", "group_id": "train/0", "status": sample_pb2.SAMPLE_STATUS_COMPLETED, **envelope}
    fields |= {"digest": digest_of(b""), "payload_bytes": 0}
    sample = sample_pb2.Sample(envelope=sample_pb2.SampleEnvelope(**fields))
    group = pb.GroupPut(lease_id="train/0#1.x", group_id="train/0", outcome=pb.PUT_OUTCOME_COMPLETE, samples=[sample])
    return pb.PutGroupsRequest(groups=[group])


def lease(**changes: Any) -> pb.LeaseGroupsRequest:
    fields = {"stream": "train", "producer_id": "p", "request_id": "r", "max_groups": 1, **changes}
    return pb.LeaseGroupsRequest(**fields)


def column(num: int, **changes: Any) -> sample_pb2.OutOfLineColumn:
    fields = {"name": f"c{num}", "sha256": b"\0" * 32, "num_bytes": 1, **changes}
    return sample_pb2.OutOfLineColumn(**fields)


CREATE: list[dict[str, Any]] = [
    {"name": name} for name in ("", "x" * 129, "a b", "a\0b", "a\n", "/", "a//b", "..", "a/../b", "/a", "a/", "é")
] + [
    {"n_samples_per_prompt": 2**32 - 1}, {"n_samples_per_prompt": 4_097}, {"groups_per_step": 2**32 - 1},
    {"groups_per_step": 4_096, "n_samples_per_prompt": 17}, {"max_staleness": 2**32 - 1}, {"lease_seconds": 1e300},
    {"lease_seconds": float("inf")}, {"lease_seconds": 1e-320}, {"max_attempts": 2**32 - 1},
    {"retain_steps": 2**32 - 1}, {"over_sampling_groups": 2**32 - 1},
    {"max_payload_bytes": 2**64 - 1}, {"max_queued_groups": 2**64 - 1}, {"max_groups": 2**63}, {"max_leases": 2**63},
    {"shard": 1, "num_shards": 2**32 - 1}, {"shard": 3, "num_shards": 2},
    {"limiter": pb.RateLimiter(min_size_to_sample=2**32 - 1)},
    {"limiter": pb.RateLimiter(samples_per_insert=1e-320, error_buffer=1e308)},
    {"limiter": pb.RateLimiter(samples_per_insert=float("nan"), error_buffer=1.0)},
    *({"files": [pb.FileSource(**{"path": "p", "input_key": "k", **bad})]} for bad in Changes((
        {"path": LONG}, {"input_key": LONG}, {"input_key": "a\0"}, {"label_key": LONG}, {"weight": float("inf")},
        {"weight": 1e-320}, {"num_workers": 2**32 - 1}, {"first_row": 2**64 - 1}, {"end_row": 2**64 - 1},
        {"num_epochs": 2**32 - 1},
    ))),
    {"files": [pb.FileSource(path="p", input_key="k")] * 65},
]  # fmt: skip


def drop(**fields: Any) -> pb.DropGroupsRequest:
    return pb.DropGroupsRequest(**{"stream": "train", "request_id": "r", "reason": "why", **fields})


REFUSED: list[tuple[str, Any]] = [
    *(("CreateStream", pb.CreateStreamRequest(config=stream(**bad))) for bad in CREATE),
    *(("SubmitPrompts", prompt(**bad)) for bad in (
        {"prompt_id": ""}, {"prompt_id": LONG}, {"prompt_id": "a\0"}, {"text": "x" * (9 << 20)},
        {"metadata_json": "[1]"}, {"metadata_json": '{"a":' * 900 + "1" + "}" * 900}, {"metadata_json": '{"a":1e999'},
        {"metadata_json": '{"a": "' + "x" * (2 << 20) + '"}'}, {"tools_json": "{}"}, {"tools_json": "[" * 100_000},
        {"messages": sample_pb2.ChatMessages(messages=[sample_pb2.ChatMessage(role=LONG)])},
        {"messages": sample_pb2.ChatMessages(messages=[sample_pb2.ChatMessage(role="u", extra_json="[]")])},
        {"messages": sample_pb2.ChatMessages(messages=[sample_pb2.ChatMessage(role="u")] * 5_000)},
    )),
    ("SubmitPrompts", pb.SubmitPromptsRequest(stream="train", prompts=[prompt().prompts[0]] * 10_001)),
    *(("LeaseGroups", lease(**bad)) for bad in (
        {"producer_id": ""}, {"producer_id": LONG}, {"producer_id": "a\x1b[31m"}, {"request_id": LONG},
        {"request_id": "\0"}, {"max_groups": 0}, {"wait_seconds": float("nan")}, {"wait_seconds": float("inf")},
        {"wait_seconds": -1.0},
    )),
    ("RenewLeases", pb.RenewLeasesRequest(lease_ids=["a"] * 10_001)),
    ("RenewLeases", pb.RenewLeasesRequest(lease_ids=[LONG])),
    ("ReleaseLeases", pb.ReleaseLeasesRequest(releases=[pb.LeaseRelease(lease_id=f"{i}") for i in range(3_000)])),
    ("ReleaseLeases", pb.ReleaseLeasesRequest(releases=[pb.LeaseRelease(lease_id="\0")])),
    ("RetryGroups", pb.RetryGroupsRequest(stream="train", request_id="r", group_ids=["a"] * 5_000)),
    ("RetryGroups", pb.RetryGroupsRequest(stream="train", request_id=LONG)),
    *(("DropGroups", drop(**bad)) for bad in (
        {}, {"group_ids": ["a"] * 1_025}, {"group_ids": ["a"], "request_id": LONG}, {"group_ids": ["a\0"]},
        {"group_ids": [LONG]}, {"group_ids": ["a"], "reason": ""}, {"group_ids": ["a", "a"]},
    )),
    *(("PutGroups", put(**bad)) for bad in (
        {"sample_id": ""}, {"sample_id": LONG}, {"sample_id": "a\0"}, {"rollout_id": LONG}, {"scorer": LONG},
        {"tags": {LONG: "v"}}, {"tags": {"k": "v" * 3_000}}, {"tags": {f"{i}": "v" for i in range(65)}},
        {"reward_parts": {f"{i}": 1.0 for i in range(65)}}, {"index": 2**32 - 1},
        {"policy_ranges": [sample_pb2.PolicyRange()] * 4_097},
        {"out_of_line": [column(i) for i in range(65)]}, {"out_of_line": [column(0), column(0)]},
        {"out_of_line": [column(0, sha256=b"short")]}, {"out_of_line": [column(0, num_bytes=2**63)]},
    )),
    ("PutGroups", pb.PutGroupsRequest(groups=[put().groups[0]] * 1_001)),
    ("PutGroups", pb.PutGroupsRequest(groups=[pb.GroupPut(
        lease_id="l", group_id="train/0", outcome=pb.PUT_OUTCOME_COMPLETE,
        samples=[put().groups[0].samples[0]] * 5_000)])),
    ("PutGroups", pb.PutGroupsRequest(groups=[pb.GroupPut(
        lease_id="l", group_id="train/0", outcome=pb.PUT_OUTCOME_FAILED, failure=sample_pb2.Failure(reason=LONG))])),
    ("LeaseBatch", pb.LeaseBatchRequest(stream="train", epoch=1, wait_seconds=float("nan"))),
    ("FetchSamples", pb.FetchSamplesRequest(stream="train", sample_ids=["a"] * 65_537)),
    ("CommitStep", pb.CommitStepRequest(stream="train", epoch=1, step=-1)),
    ("CommitStep", pb.CommitStepRequest(stream="train", epoch=1, step=HUGE)),
    *(("Rewind", pb.RewindRequest(stream="train", **{"request_id": "r", **bad})) for bad in Changes((
        {"step": -1}, {"step": HUGE}, {"least_epoch": HUGE}, {"least_epoch": -1}, {"request_id": ""},
        {"request_id": LONG}, {"request_id": "a\0"},
    ))),
    *(("SetPolicyVersion", pb.SetPolicyVersionRequest(stream="train", epoch=1, policy_version=n)) for n in (-1, HUGE)),
    *(("ListGroups", pb.ListGroupsRequest(stream="train", page_token=t)) for t in (LONG, "-1", "²", "٣", "9" * 5_000)),
    ("ListGroups", pb.ListGroupsRequest(stream="train", group_ids=["a"] * 1_001)),
    ("ListGroups", pb.ListGroupsRequest(stream="train", states=[pb.GROUP_STATE_QUEUED] * 100_000)),
    *(("UploadColumn", pb.UploadColumnRequest(**{"sha256": b"\0" * 32, "num_bytes": 10, **bad})) for bad in Changes((
        {"sha256": b""}, {"sha256": b"x" * 33}, {"num_bytes": 2**64 - 1}, {"offset": 11}, {"offset": 2**64 - 1},
        {"num_bytes": 1 << 30, "data": b"x" * (9 << 20)},
    ))),
    ("FetchColumn", pb.FetchColumnRequest(sha256=b"x")),
    ("FetchColumn", pb.FetchColumnRequest(sha256=b"\0" * 32, offset=2**64 - 1)),
    ("DeleteStream", pb.DeleteStreamRequest(stream=LONG)),
    ("DeleteStream", pb.DeleteStreamRequest(stream="")),
]  # fmt: skip


@pytest.fixture
async def served(tmp_path: Any) -> AsyncIterator[tuple[BufferClient, buffer_pb2_grpc.BufferServiceStub]]:
    store = SqliteStore(tmp_path / "ledger")
    async with (
        served_buffer(store, prompt_root=tmp_path, columns_folder=tmp_path / "columns", max_column_bytes=100 << 20) as (
            _,
            server,
        ),
        BufferClient(server.address) as client,
        connect(server.address) as channel,
    ):
        await client.create_stream(stream(name="train"))
        yield client, buffer_pb2_grpc.BufferServiceStub(channel)


async def answer(stub: buffer_pb2_grpc.BufferServiceStub, method: str, request: Any) -> grpc.StatusCode:
    call = getattr(stub, method)(request, timeout=120)
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_what_exceeds_a_limit_is_refused_and_changes_nothing(served: Any) -> None:
    client, stub = served
    await client.rewind("train", 0)
    await client.submit_prompts("train", text_prompts("a"))
    await client.lease_groups("train", "p", 1)
    before = await stub.GetStats(pb.GetStatsRequest())
    for method, request in REFUSED:
        assert await answer(stub, method, request) is INVALID, f"{method} {str(request)[:200]}"
    assert await stub.GetStats(pb.GetStatsRequest()) == before


def envelope_of(lease: pb.GroupLease, index: int, num_bytes: int) -> sample_pb2.Sample:
    """Its envelope holds about `num_bytes`."""
    sample = completed_sample(lease, index, 0).pack()
    for i in range(num_bytes // 2_000):
        sample.envelope.tags[f"{i}"] = "x" * 2_000
    return sample


def put_with(lease: pb.GroupLease, num_bytes: int) -> pb.GroupPut:
    samples = [envelope_of(lease, i, num_bytes) for i in range(lease.n_samples)]
    return pb.GroupPut(
        lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=samples
    )


async def test_answers_are_filled_by_bytes_and_no_lease_is_burned(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MAX_BATCH_ANSWER_BYTES", 2 << 20)
    client, stub = served
    await client.create_stream(stream(name="large", groups_per_step=12, n_samples_per_prompt=6, max_attempts=1))
    for i in range(12):
        large = sample_pb2.Prompt(prompt_id=f"{i}", text=f"{i}" + "x" * (1 << 20))
        await client.submit_prompts("large", [large])
    leases: list[pb.GroupLease] = []
    while len(leases) < 12:
        reply = await stub.LeaseGroups(lease(stream="large", request_id=f"{len(leases)}", max_groups=1_000), timeout=60)
        assert reply.ByteSize() < 4 << 20
        assert reply.leases
        leases += reply.leases
    assert (await client.stats("large")).groups["LEASED"] == 12
    for granted in leases:
        await client.put_groups([put_with(granted, 60_000)])  # a batch of 4 MB
    epoch = (await client.rewind("large", 0)).epoch
    first = await stub.LeaseBatch(pb.LeaseBatchRequest(stream="large", epoch=epoch, step=0), timeout=60)
    assert first.ByteSize() < 3 << 20
    assert 0 < first.next_group < 12
    batch = await client.lease_batch("large", epoch, 0)
    assert [group.group_id for group in batch.groups] == [granted.group_id for granted in leases]
    assert (batch.digest, batch.next_group) == (first.digest, 0)


@pytest.mark.parametrize("what", ["prompts", "envelopes", "partials", "columns"])
async def test_everything_that_is_stored_counts_towards_the_streams_bytes(served: Any, what: str) -> None:
    client, _ = served
    await client.create_stream(stream(name="small", max_payload_bytes=100_000))
    await client.submit_prompts("small", text_prompts("a", "b", "c"))
    first, second, third = (await client.lease_groups("small", "p", 3)).leases

    async def store(granted: pb.GroupLease) -> None:
        if what == "prompts":
            await client.submit_prompts("small", [sample_pb2.Prompt(prompt_id=granted.lease_id, text="x" * 60_000)])
        elif what == "envelopes":
            await client.put_groups([put_with(granted, 60_000)])
        elif what == "partials":
            partial = envelope_of(granted, 0, 60_000)
            await client.release_leases([pb.LeaseRelease(lease_id=granted.lease_id, partial_samples=[partial])])
        else:
            data = granted.lease_id.encode().ljust(60_000)
            name = hashlib.sha256(data).digest()
            sample = completed_sample(granted, 0, 0).pack()
            payload = sample_pb2.SamplePayload.FromString(sample.payload)
            payload.columns.add(name="extra", dtype=sample_pb2.DTYPE_UINT8, shape=[len(data)])
            sample.payload = payload.SerializeToString()
            sample.envelope.payload_bytes, sample.envelope.digest = len(sample.payload), digest_of(sample.payload)
            sample.envelope.out_of_line.add(name="extra", sha256=name, num_bytes=len(data))
            await uploaded(client, name, data)
            whole = complete_put(granted)
            whole.samples[0].CopyFrom(sample)
            await client.put_groups([whole])

    await store(first)
    with refused(ResourceExhausted, "max_payload_bytes 100000"):
        await store(second)
    assert (await client.stats("small")).stored_bytes <= 100_000
    await client.renew_leases([third.lease_id])


async def uploaded(client: BufferClient, name: bytes, data: bytes) -> None:
    request = pb.UploadColumnRequest(sha256=name, num_bytes=len(data), data=data)
    await client._call(client._stub.UploadColumn, request)


async def test_streams_are_limited_in_number_and_can_be_deleted(served: Any) -> None:
    client, stub = served
    for i in range(limits.MAX_STREAMS - 1):
        await client.create_stream(stream(name=f"{i}"))
    request = pb.CreateStreamRequest(config=stream(name="one-more"))
    assert await answer(stub, "CreateStream", request) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(await client.list_streams()) == limits.MAX_STREAMS
    assert await client.delete_stream("0")
    assert await answer(stub, "CreateStream", request) is grpc.StatusCode.OK
