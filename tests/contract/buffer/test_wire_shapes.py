"""Requests that no generated class writes, or that mean something twice: each has its status, and nothing is lost."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from services.buffer.store.sqlite.store import SqliteStore
from tests.hostile.wire import BUFFER, Wire, payload, sample
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.processes.buffer_server import served_buffer

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
UNKNOWN_NUMBER = 4_000
VARINT, FIXED64, BYTES, GROUP, END_GROUP = 0, 1, 2, 3, 4


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, kind: int, data: bytes = b"") -> bytes:
    """A field as it is on the wire; the length of BYTES comes first."""
    return varint(number << 3 | kind) + (varint(len(data)) if kind == BYTES else b"") + data


def number_of(message: type[Message], name: str) -> int:
    return int(message.DESCRIPTOR.fields_by_name[name].number)


RENEWED = number_of(pb.RenewLeasesRequest, "lease_ids")
STREAM = number_of(pb.GetStatsRequest, "stream")
STATES = number_of(pb.ListGroupsRequest, "states")
LISTED = pb.ListGroupsRequest(stream="train").SerializeToString()

SHAPES: Mapping[str, tuple[str, bytes, grpc.StatusCode]] = {
    "8 MiB that nobody knows": ("GetStats", field(UNKNOWN_NUMBER, BYTES, bytes(8 << 20)), OK),
    "a million unknown numbers": ("GetStats", field(UNKNOWN_NUMBER, VARINT, b"\1") * 1_000_000, INVALID),
    "a million empty ids": ("RenewLeases", field(RENEWED, BYTES) * 1_000_000, INVALID),
    "groups inside of groups": ("GetStats", field(UNKNOWN_NUMBER, GROUP) * 100_000, INVALID),
    "groups inside of groups that end": (
        "GetStats",
        field(UNKNOWN_NUMBER, GROUP) * 50_000 + field(UNKNOWN_NUMBER, END_GROUP) * 50_000,
        INVALID,
    ),
    "a group that only ends": ("GetStats", field(UNKNOWN_NUMBER, END_GROUP), INVALID),
    "field number 0": ("GetStats", field(0, VARINT, b"\1"), INVALID),
    "a wire type that is none": ("GetStats", field(UNKNOWN_NUMBER, 7), INVALID),
    "a varint of eleven bytes": ("GetStats", field(UNKNOWN_NUMBER, VARINT, b"\xff" * 10 + b"\1"), INVALID),
    "a length beyond the end": ("RenewLeases", varint(RENEWED << 3 | BYTES) + varint(2**31 - 1) + b"x", INVALID),
    "a negative length": ("RenewLeases", varint(RENEWED << 3 | BYTES) + varint(2**64 - 1), INVALID),
    "a name that is no UTF-8": ("GetStats", field(STREAM, BYTES, b"\xed\xa0\x80"), INVALID),
    "a name as a number": ("GetStats", field(STREAM, VARINT, b"\1"), OK),
    "a name twice, of which the last counts": (
        "ListGroups",
        field(number_of(pb.ListGroupsRequest, "stream"), BYTES, b"no") + LISTED,
        OK,
    ),
    "states one by one": ("ListGroups", LISTED + field(STATES, VARINT, b"\1") * 2, OK),
    "states one by one and together": (
        "ListGroups",
        LISTED + field(STATES, VARINT, b"\1") + field(STATES, BYTES, b"\1\2") + field(STATES, VARINT, b"\2"),
        OK,
    ),
    "a state that is none": ("ListGroups", LISTED + field(STATES, BYTES, varint(2**31 - 1)), INVALID),
    "a negative state": ("ListGroups", LISTED + field(STATES, VARINT, varint(2**64 - 1)), INVALID),
    "a prompt of no kind": (
        "SubmitPrompts",
        pb.SubmitPromptsRequest(stream="train", prompts=[{"prompt_id": "p"}]).SerializeToString(),
        INVALID,
    ),
}


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[BufferClient, Wire]]:
    async with (
        served_buffer(SqliteStore(tmp_path / "ledger")) as (_, server),
        BufferClient(server.address) as client,
        Wire(server.address, BUFFER) as wire,
    ):
        await client.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=1, groups_per_step=1))
        await client.submit_prompts("train", text_prompts("a", "b", "c"))
        yield client, wire


async def test_every_shape_on_the_wire_has_its_status_and_changes_nothing(place: tuple[BufferClient, Wire]) -> None:
    client, wire = place
    before = await client.stats("train")
    for name, (method, data, code) in SHAPES.items():
        reply = await wire.send(BUFFER.methods_by_name[method], data, seconds=60)
        assert reply.code is code, f"{name}: {reply.code.name} {reply.message}"
        assert reply.ok or reply.reason, name
    assert await client.stats("train") == before


def put_of(lease: pb.GroupLease, *, sample_id: str | None = None, reward: float = 1.0) -> pb.GroupPut:
    return pb.GroupPut(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        outcome=pb.PUT_OUTCOME_COMPLETE,
        samples=[
            sample(sample_id or f"{lease.lease_id}/0", lease.group_id, 0, lease.policy_version, reward=reward),
        ],
    )


async def test_a_put_is_taken_as_a_whole_or_not_at_all(place: tuple[BufferClient, Wire]) -> None:
    client, wire = place
    leases = (await client.lease_groups("train", "p", 3)).leases
    good = [put_of(lease) for lease in leases]
    wrong = pb.GroupPut()
    wrong.CopyFrom(good[1])
    for value in (math.nan, math.inf, -math.inf):
        wrong.samples[0].envelope.reward = value
        await refused(wire, [good[0], wrong])
    wrong.CopyFrom(good[1])
    for outcome in (0, -1, 2**31 - 1):
        wrong.outcome = outcome  # type: ignore[assignment]  # protobuf's enums are open
        await refused(wire, [good[0], wrong])
    wrong.CopyFrom(good[1])
    wrong.samples[0].envelope.prompt_tokens = 2**32 - 1
    await refused(wire, [good[0], wrong])
    for times in (2, 10_000):
        await refused(wire, good[:1] * times)
    for duplicate in (False, True):
        assert [result.duplicate for result in await client.put_groups(good)] == [duplicate] * 3
    assert (await client.stats("train")).groups["READY"] == 3


async def refused(wire: Wire, puts: list[pb.GroupPut]) -> None:
    request = pb.PutGroupsRequest(groups=puts).SerializeToString()
    reply = await wire.send(BUFFER.methods_by_name["PutGroups"], request, seconds=60)
    assert (reply.code, bool(reply.reason)) == (INVALID, True), reply.message[:300]


async def test_a_reward_of_minus_zero_and_names_that_turn_the_line_come_back_as_they_were(
    place: tuple[BufferClient, Wire],
) -> None:
    client, wire = place
    (lease,) = (await client.lease_groups("train", "p", 1)).leases
    sample_id = "\u202egnp.\u200b\u2066é/../../x"
    put = put_of(lease, sample_id=sample_id, reward=-0.0)
    put.samples[0].envelope.tags["\u202ekey"] = "\u2028\u0301"
    await client.put_groups([put])
    request = pb.FetchSamplesRequest(stream="train", sample_ids=[sample_id])
    (reply,) = await wire.ask_all("FetchSamples", request)
    (found,) = reply.samples
    assert found.envelope.tags == {"\u202ekey": "\u2028\u0301"}
    assert math.copysign(1.0, found.envelope.reward) == -1.0
    assert found.payload == payload([1, 2, 3, 10, 5], 2)
