"""The buffer over gRPC: what the state machine's tests cannot see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from headrace.ledger_tools.audit_run import read_ledger
from headrace.rpc import client as rpc
from services.buffer.ledger.state import Instant
from services.buffer.ledger.stream import StreamConfig
from services.buffer.runtime import commit
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.buffer_samples import complete_put, completed_sample, text_prompts
from tests.support.processes.buffer_server import served_buffer


def stream(**changes: object) -> pb.StreamConfig:
    fields: dict[str, object] = {
        "name": "train",
        "n_samples_per_prompt": 2,
        "groups_per_step": 2,
        "max_staleness": 1,
        **changes,
    }
    return pb.StreamConfig(**fields)  # type: ignore[arg-type]


@pytest.fixture
async def client() -> AsyncIterator[BufferClient]:
    async with (
        served_buffer(MemoryStore(), prompt_root=Path("/")) as (_, server),
        BufferClient(server.address) as client,
    ):
        await client.create_stream(stream())
        yield client


async def test_waiting_producers_and_trainers_are_woken_by_the_change(client: BufferClient) -> None:
    epoch = (await client.rewind("train", 0)).epoch
    producer = asyncio.create_task(client.lease_groups("train", "p", 2, wait_seconds=30))
    trainer = asyncio.create_task(client.try_lease_batch("train", epoch, 0, wait_seconds=30))
    async with asyncio.timeout(180):
        await client.submit_prompts("train", text_prompts("a", "b"))
        leases = (await producer).leases
        assert not trainer.done()
        await client.put_groups([complete_put(x) for x in leases])
        assert (await trainer).ready


async def test_a_wait_ends_empty_before_its_deadline_and_says_why(client: BufferClient) -> None:
    reply = await client.lease_groups("train", "p", 2, wait_seconds=0.05)
    assert (len(reply.leases), reply.no_lease_reason) == (0, pb.NO_LEASE_REASON_NO_PROMPTS)
    epoch = (await client.rewind("train", 0)).epoch
    progress: list[int] = []
    with pytest.raises(DeadlineExceeded, match=r"0 groups ready after 1 s"):
        await client.lease_batch("train", epoch, 0, timeout_seconds=1.0, on_progress=progress.append)
    assert progress[-1] == 0


async def test_an_expired_lease_wakes_the_next_producer(client: BufferClient) -> None:
    await client.create_stream(stream(name="quick", lease_seconds=0.2))
    await client.submit_prompts("quick", text_prompts("a"))
    first = (await client.lease_groups("quick", "p1", 1)).leases[0]
    async with asyncio.timeout(180):
        second = (await client.lease_groups("quick", "p2", 1, wait_seconds=50)).leases[0]
    assert (second.group_id, second.attempt) == (first.group_id, 2)
    (late,) = await client.put_groups([complete_put(first)])
    assert late.refused.reason == "LEASE_LOST"


async def test_limits_come_with_the_time_to_try_again(client: BufferClient) -> None:
    await client.create_stream(stream(name="small", max_queued_groups=1))
    with pytest.raises(ResourceExhausted, match="max_queued_groups 1") as refused:
        await client.submit_prompts("small", text_prompts("a", "b"))
    assert refused.value.retry_after_seconds == 1.0


async def test_a_batch_over_the_limit_is_refused_with_the_limit(client: BufferClient) -> None:
    with pytest.raises(InvalidArgument, match="prompts has 10001 entries, a call may have 10000") as refused:
        await client.submit_prompts("train", text_prompts(*(str(i) for i in range(10_001))))
    assert (refused.value.reason, refused.value.metadata["limit"]) == ("BATCH_TOO_LARGE", "10000")
    with pytest.raises(InvalidArgument, match="groups has 1001 entries, a call may have 1000"):
        await client.put_groups([pb.GroupPut()] * 1001)
    request = pb.FetchSamplesRequest(stream="train", sample_ids=["x"] * 65_537)
    with pytest.raises(InvalidArgument, match="sample_ids has 65537 entries"):
        await anext(aiter(rpc.stream(client._stub.FetchSamples, request, deadline_seconds=60.0)))


async def test_a_stream_has_one_config(client: BufferClient) -> None:
    assert not (await client.create_stream(stream())).created
    with pytest.raises(AlreadyExists, match="groups_per_step is 2, now 3"):
        await client.create_stream(stream(groups_per_step=3))
    assert [s.name for s in await client.list_streams()] == ["train"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "no spaces"}, "config.name"),
        ({"n_samples_per_prompt": 0}, "config.n_samples_per_prompt"),
        ({"groups_per_step": 0}, "config.groups_per_step"),
        ({"lease_seconds": -1.0}, "config.lease_seconds"),
        ({"lease_seconds": float("nan")}, "config.lease_seconds"),
        ({"selection": 77}, "config.selection"),
        ({"files": [pb.FileSource(path="/nowhere.jsonl", input_key="prompt")]}, "config.files.path"),
        ({"files": [pb.FileSource(path="/nowhere.jsonl")]}, "config.files.input_key"),
    ],
)
async def test_a_wrong_config_names_its_field(client: BufferClient, changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.create_stream(stream(**{"name": "new", **changes}))
    assert refused.value.field == field


async def test_wrong_samples_are_refused(client: BufferClient) -> None:
    await client.submit_prompts("train", text_prompts("a"))
    lease = (await client.lease_groups("train", "p", 1)).leases[0]
    put = complete_put(lease)
    put.samples[1].payload += b"x"
    with pytest.raises(DataLoss, match="does not match its digest"):
        await client.put_groups([put])
    put = complete_put(lease)
    put.samples[0].envelope.group_id = "train/77"
    with pytest.raises(InvalidArgument, match="says group 'train/77'"):
        await client.put_groups([put])
    put = complete_put(lease)
    put.samples[0].envelope.status = sample_pb2.SAMPLE_STATUS_FAILED
    with pytest.raises(InvalidArgument, match="a failure exactly when"):
        await client.put_groups([put])
    with pytest.raises(InvalidArgument, match="is DROPPED without a failure: say why"):
        await client.put_groups(
            [pb.GroupPut(lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_DROPPED)]
        )


async def test_samples_larger_than_a_message_come_in_several(client: BufferClient) -> None:
    await client.submit_prompts("train", text_prompts("a", "b"))
    leases = (await client.lease_groups("train", "p", 2)).leases
    puts = [complete_put(x) for x in leases]
    for put in puts:
        for i, packed in enumerate(put.samples):
            big = completed_sample(leases[puts.index(put)], i, 0)
            packed.CopyFrom(replace(big, response="x" * (3 << 20)).pack())
    await client.put_groups(puts)
    ids = [s.envelope.sample_id for p in puts for s in p.samples]
    assert [s.envelope.sample_id for s in await client.fetch_samples("train", ids)] == ids


async def test_watch_gives_the_history_and_then_what_happens(client: BufferClient) -> None:
    await client.submit_prompts("train", text_prompts("a"))
    events = client.watch("train", 2)
    async with asyncio.timeout(180):
        first = await anext(events)
        assert (first.position, first.kind, first.group_id) == (2, "submitted", "train/0")
        coming = asyncio.ensure_future(anext(events))
        await client.lease_groups("train", "p", 1)
        second = await coming
    assert (second.position, second.kind, second.state) == (3, "leased", pb.GROUP_STATE_LEASED)
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_watch_from_a_deleted_position_is_refused_with_the_oldest_and_from_0_it_begins_there() -> None:
    async with (
        served_buffer(MemoryStore(), retain_events=16) as (_, server),
        BufferClient(server.address) as client,
    ):
        await client.create_stream(stream(max_queued_groups=100))
        for i in range(40):
            await client.submit_prompts("train", text_prompts(f"p{i}"))
        with pytest.raises(OutOfRange, match="watch from 25, or from 0") as refused:
            await anext(client.watch("train", 1))
        assert refused.value.metadata["oldest_position"] == "25"
        for first in (0, 25):
            assert (await anext(client.watch("train", first))).position == 25
        with pytest.raises(OutOfRange, match="events before position 25 are deleted"):
            await read_ledger(client, "train", 60.0)


async def test_an_exhausted_file_ends_the_wait_for_a_batch(client: BufferClient, tmp_path: Path) -> None:
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(3)))
    file = pb.FileSource(path=str(path), input_key="prompt", num_epochs=1)
    await client.create_stream(stream(name="short", files=[file]))
    epoch = (await client.rewind("short", 0)).epoch
    leases = (await client.lease_groups("short", "p", 9)).leases
    await client.put_groups([complete_put(x) for x in leases])
    batch = await client.lease_batch("short", epoch, 0)
    await client.consume("short", epoch, 0, batch.digest)
    await client.set_policy_version("short", epoch, 1)
    assert (await client.lease_groups("short", "p", 9)).no_lease_reason == pb.NO_LEASE_REASON_EXHAUSTED
    with pytest.raises(FailedPrecondition, match="1 groups are left for step 1, a batch has 2") as refused:
        await client.lease_batch("short", epoch, 1)
    assert refused.value.reason == "EXHAUSTED"


async def test_a_restart_may_change_the_limits_and_nothing_else(tmp_path: Path) -> None:
    config = StreamConfig("train", n_samples_per_prompt=2, groups_per_step=4, max_staleness=9)
    async with served_buffer(SqliteStore(tmp_path)) as (buffer, server), BufferClient(server.address) as client:
        await buffer.create_stream(config)
        await client.submit_prompts("train", text_prompts("a"))
    async with served_buffer(SqliteStore(tmp_path)) as (buffer, server), BufferClient(server.address) as client:
        await buffer.set_limits(replace(config, max_staleness=3, max_payload_bytes=1000))
        (found,) = await client.list_streams()
        assert (found.max_staleness, found.max_payload_bytes) == (3, 1000)
        assert (await client.stats("train")).groups["QUEUED"] == 1
        with pytest.raises(AlreadyExists, match="groups_per_step is 4, now 5; use another name"):
            await buffer.create_stream(replace(config, groups_per_step=5, max_staleness=3, max_payload_bytes=1000))


async def test_two_samples_of_one_index_need_a_shared_rollout_id(client: BufferClient) -> None:
    await client.submit_prompts("train", text_prompts("a"))
    (lease,) = (await client.lease_groups("train", "p", 1)).leases
    put = complete_put(lease)
    for sample in put.samples:
        sample.envelope.index = 0
    for rollout_ids in (("", ""), ("one", "other"), ("one", "")):
        for sample, rollout_id in zip(put.samples, rollout_ids, strict=True):
            sample.envelope.rollout_id = rollout_id
        with pytest.raises(InvalidArgument, match="samples of one execution share a rollout_id"):
            await client.put_groups([put])
    for sample in put.samples:
        sample.envelope.rollout_id = "one"
    (result,) = await client.put_groups([put])
    assert (result.state, result.HasField("refused")) == (pb.GROUP_STATE_READY, False)


async def trained(client: BufferClient, epoch: int, num_steps: int) -> list[pb.LeaseBatchResponse]:
    """So many steps from 0 on, none committed."""
    batches = []
    for step in range(num_steps):
        await client.submit_prompts("train", text_prompts(*(f"{step}/{i}" for i in range(2))))
        await client.put_groups([complete_put(x) for x in (await client.lease_groups("train", "p", 2)).leases])
        batches.append(await client.lease_batch("train", epoch, step))
        await client.consume("train", epoch, step, batches[-1].digest)
        await client.set_policy_version("train", epoch, step + 1)
    return batches


@pytest.mark.parametrize(("committed", "checkpoint"), [(0, 4), (1, 3)])
async def test_after_a_rewind_no_step_before_the_checkpoint_is_given_again(
    tmp_path: Path, committed: int, checkpoint: int
) -> None:
    """Though no commit covers it yet: the trainer's checkpoint has trained on it. So it is after a restart."""
    async with served_buffer(SqliteStore(tmp_path)) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(stream())
        epoch = (await client.rewind("train", 0)).epoch
        batches = await trained(client, epoch, 5)
        await client.commit("train", epoch, committed)
        epoch = (await client.rewind("train", checkpoint)).epoch
    async with served_buffer(SqliteStore(tmp_path)) as (_, server), BufferClient(server.address) as client:
        for step in range(checkpoint):
            with pytest.raises(FailedPrecondition, match=f"steps from {checkpoint} on can be leased again"):
                await client.try_lease_batch("train", epoch, step)
            with pytest.raises(FailedPrecondition, match=f"steps from {checkpoint} on can be leased again"):
                await client.consume("train", epoch, step, batches[step].digest)
        for step in range(checkpoint, 5):
            again = await client.try_lease_batch("train", epoch, step)
            assert again.digest == batches[step].digest
            await client.consume("train", epoch, step, again.digest)
        earlier = (await client.rewind("train", committed)).epoch
        assert (await client.try_lease_batch("train", earlier, committed)).digest == batches[committed].digest


class AwayStore(MemoryStore):
    """Its database is away while `away` is set."""

    away = False

    @property
    def waiting_for(self) -> Unavailable | None:
        return Unavailable("the database is away: try again") if self.away else None


@pytest.mark.parametrize(("lease_seconds", "away_seconds", "num_leases"), [(5.0, 3_600.0, 3)])
async def test_leases_have_their_full_time_when_the_database_is_back(
    monkeypatch: pytest.MonkeyPatch, lease_seconds: float, away_seconds: float, num_leases: int
) -> None:
    clock = [0.0]
    real = commit.now
    later: Callable[[], Instant] = lambda: Instant(real().monotonic + clock[0], real().unix)  # noqa: E731
    monkeypatch.setattr(commit, "now", later)
    store = AwayStore()
    async with served_buffer(store) as (buffer, server), BufferClient(server.address) as client:
        heard: asyncio.Queue[bool] = asyncio.Queue()
        buffer.pulse.listeners.append(heard.put)  # told after the leases were renewed
        await client.create_stream(stream(lease_seconds=lease_seconds, max_staleness=100))
        await client.submit_prompts("train", text_prompts(*(f"{i}" for i in range(num_leases))))
        leases = (await client.lease_groups("train", "p", num_leases)).leases
        assert len(leases) == num_leases
        store.away = True
        assert not await heard.get()
        clock[0] += away_seconds
        store.away = False
        assert await heard.get()
        clock[0] += lease_seconds / 2
        assert len(buffer.ledger.renew(commit.now(), [x.lease_id for x in leases])[0]) == num_leases
        assert (await client.stats("train")).groups["LEASED"] == num_leases
