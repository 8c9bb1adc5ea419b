"""One buffer and the shards of one: the same contract; and a shard that is down."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.main import main
from headrace.client.open import Buffer, open_buffer
from headrace.client.shards import ShardedBuffer
from headrace.errors import AlreadyExists, FailedPrecondition, Fenced, InvalidArgument, NotFound
from headrace.job.schema.services import BufferSection
from headrace.trajectory import Sample
from services.buffer.store.memory import MemoryStore
from tests.support.ledgers.buffer_samples import complete_put, failed_put, text_prompts
from tests.support.processes.buffer_server import BufferProcess, served_buffer
from tests.support.refusals import refused

STREAM = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=6, max_staleness=1)
NAMES = [f"q{i}" for i in range(24)]


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} buffers")
async def buffer(request: pytest.FixtureRequest) -> AsyncIterator[Buffer]:
    """With a stream of six groups a step."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(served_buffer(MemoryStore())) for _ in range(request.param)]
        buffer = open_buffer(",".join(server.address for _, server in servers))
        assert (await buffer.create_stream(STREAM)).created
        yield buffer
        await buffer.close()


async def produce(buffer: Buffer, count: int) -> list[str]:
    """Leases so many groups and puts them."""
    done: list[str] = []
    while len(done) < count:
        leases = (await buffer.lease_groups("train", "p", count - len(done), wait_seconds=5)).leases
        results = await buffer.put_groups([complete_put(lease) for lease in leases])
        assert [result.group_id for result in results] == [lease.group_id for lease in leases]
        assert {result.state for result in results} == {pb.GROUP_STATE_READY}
        done += [lease.group_id for lease in leases]
    return done


async def test_prompts_are_kept_once_and_ids_are_unique(buffer: Buffer) -> None:
    first = list(await buffer.submit_prompts("train", text_prompts(*NAMES)))
    assert len(set(first)) == len(NAMES)
    assert list(await buffer.submit_prompts("train", text_prompts(*reversed(NAMES)))) == first[::-1]
    found = (await buffer.list_groups("train", group_ids=[first[3], "train/999999"])).groups
    assert [(group.group_id, group.prompt.prompt_id) for group in found] == [(first[3], NAMES[3])]
    changed = text_prompts("q1")
    changed[0].text = "another"
    with pytest.raises(AlreadyExists):
        await buffer.submit_prompts("train", changed)


async def test_failed_groups_are_tried_again_on_every_shard(buffer: Buffer, capsys: pytest.CaptureFixture[str]) -> None:
    group_ids = list(await buffer.submit_prompts("train", text_prompts(*NAMES[:6])))
    for _ in range(3):
        leases: list[pb.GroupLease] = []
        while len(leases) < 6:
            leases += (await buffer.lease_groups("train", "p", 6 - len(leases), wait_seconds=5)).leases
        await buffer.put_groups([failed_put(lease) for lease in leases])
    assert await retried(buffer, "--dry-run") == 0
    assert "6 FAILED  ENGINE_DOWN: nobody answered" in capsys.readouterr().out
    chosen = group_ids[:2]
    first = await buffer.retry_groups("train", chosen, request_id="mended")
    assert (first.num_groups, first == await buffer.retry_groups("train", chosen, request_id="mended")) == (2, True)
    assert (await buffer.stats("train")).groups["FAILED"] == 4
    assert await retried(buffer) == 0
    assert "4 groups queued again" in capsys.readouterr().out
    assert len(await produce(buffer, 6)) == 6
    with refused(FailedPrecondition, "READY", reason="NOT_FAILED"):
        await buffer.retry_groups("train", chosen)


async def test_groups_are_dropped_on_every_shard_by_an_operators_command(
    buffer: Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = list(await buffer.submit_prompts("train", text_prompts(*NAMES)))[-1]
    epoch = (await buffer.rewind("train", 0)).epoch
    await produce(buffer, 12)
    batch = await buffer.lease_batch("train", epoch, 0, timeout_seconds=30)
    chosen = [batch.groups[0].group_id, batch.groups[-1].group_id, queued]
    words = [word for group_id in chosen for word in ("--group", group_id)]
    assert await told(buffer, "drop", *words, "--reason", "poison", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert f"{chosen[0]}  READY, in the batch of step 0" in shown
    assert f"{queued}  QUEUED" in shown
    assert "dropped" not in shown
    assert (await buffer.try_lease_batch("train", epoch, 0)).digest == batch.digest
    assert await told(buffer, "drop", *words, "--reason", "poison") == 0
    assert "3 groups dropped, " in capsys.readouterr().out
    assert (await buffer.stats("train")).groups["DROPPED"] == 3
    again = await buffer.lease_batch("train", epoch, 0, timeout_seconds=30)
    assert not {group.group_id for group in again.groups} & set(chosen)
    assert len(again.groups) == 6
    await buffer.consume("train", epoch, 0, again.digest)
    first = again.groups[0].group_id
    assert await told(buffer, "drop", "--group", first, "--reason", "too late") == 1
    assert f"{first} is CONSUMED" in capsys.readouterr().err
    with pytest.raises(NotFound):
        await buffer.drop_groups("train", ["train/999999"], "not there")


async def retried(buffer: Buffer, *words: str) -> int:
    return await told(buffer, "retry", *words)


async def told(buffer: Buffer, command: str, *words: str) -> int:
    return await asyncio.to_thread(main, ["buffer", command, "--buffer-address", addresses(buffer), *words])


def addresses(buffer: Buffer) -> str:
    shards: list[Any] = [*buffer.shards] if isinstance(buffer, ShardedBuffer) else [buffer]
    return ",".join(shard.address for shard in shards)


async def test_an_operator_deletes_a_stream_from_every_shard(
    buffer: Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def deleted(*words: str) -> int:
        return await asyncio.to_thread(main, ["buffer", "delete-stream", *words])

    await buffer.submit_prompts("train", text_prompts(*NAMES[:6]))
    assert await deleted(addresses(buffer), "train") == 1
    assert "set force to delete them" in capsys.readouterr().err
    assert (await buffer.stats("train")).groups["QUEUED"] == 6
    assert await deleted(addresses(buffer), "train", "--force") == 0
    assert "train: deleted" in capsys.readouterr().out
    assert not await buffer.list_streams()
    assert await deleted(addresses(buffer), "train") == 0
    assert "train: the buffer has no such stream" in capsys.readouterr().out


async def test_steps_over_all_shards(buffer: Buffer) -> None:
    await buffer.submit_prompts("train", text_prompts(*NAMES))
    epoch = (await buffer.rewind("train", 0)).epoch
    seen: list[str] = []
    for step in range(3):
        await produce(buffer, 6)
        batch = await buffer.lease_batch("train", epoch, step, timeout_seconds=10)
        again = await buffer.lease_batch("train", epoch, step, timeout_seconds=10)
        assert batch == again
        ids = [sample.sample_id for group in batch.groups for sample in group.samples]
        samples = [Sample.unpack(packed) for packed in await buffer.fetch_samples("train", ids[::-1])]
        assert [sample.sample_id for sample in samples] == ids[::-1]
        assert len(batch.groups) == 6
        with refused(FailedPrecondition, reason="OTHER_BATCH"):
            await buffer.consume("train", epoch, step, b"x" * 32)
        assert await buffer.consume("train", epoch, step, batch.digest) == step + 1
        assert await buffer.set_policy_version("train", epoch, step + 1) == 0
        seen += [group.group_id for group in batch.groups]
    assert len(set(seen)) == 18
    assert await buffer.commit("train", epoch, 2) == 12
    with refused(NotFound, "committed"):
        await buffer.fetch_samples("train", [f"{seen[0]}#1", *ids])
    stats = await buffer.stats("train")
    assert (stats.step, stats.committed_step, stats.policy_version, stats.epoch) == (3, 2, 3, epoch)
    assert {state: number for state, number in stats.groups.items() if number} == {
        "COMMITTED": 12,
        "CONSUMED": 6,
        "QUEUED": 6,
    }


async def test_a_rewound_step_is_the_same_batch_and_the_old_trainer_is_fenced(buffer: Buffer) -> None:
    await buffer.submit_prompts("train", text_prompts(*NAMES))
    old = (await buffer.rewind("train", 0)).epoch
    await produce(buffer, 6)
    batch = await buffer.lease_batch("train", old, 0, timeout_seconds=10)
    await buffer.consume("train", old, 0, batch.digest)
    answer = await buffer.rewind("train", 0, request_id="again")
    assert answer.num_groups == 6
    assert (await buffer.rewind("train", 0, request_id="again")).epoch == answer.epoch
    assert await buffer.lease_batch("train", answer.epoch, 0, timeout_seconds=10) == batch
    for call in (
        buffer.try_lease_batch("train", old, 0),
        buffer.consume("train", old, 0, batch.digest),
        buffer.commit("train", old, 1),
        buffer.set_policy_version("train", old, 1),
    ):
        with refused(Fenced, "stop"):
            await call


async def test_leases_are_renewed_released_and_lost(buffer: Buffer) -> None:
    await buffer.submit_prompts("train", text_prompts(*NAMES))
    leases = (await buffer.lease_groups("train", "p", 4, wait_seconds=5, request_id="one")).leases
    again = (await buffer.lease_groups("train", "p", 4, wait_seconds=5, request_id="one")).leases
    assert {lease.lease_id for lease in again} == {lease.lease_id for lease in leases}
    ids = [lease.lease_id for lease in leases]
    assert sorted((await buffer.renew_leases(ids)).renewed) == sorted(ids)
    await buffer.release_leases([pb.LeaseRelease(lease_id=ids[0], reason="enough")])
    kept = await buffer.renew_leases(ids)
    assert (list(kept.lost), sorted(kept.renewed)) == (ids[:1], sorted(ids[1:]))
    (late,) = await buffer.put_groups([complete_put(leases[0])])
    assert late.refused.reason == "LEASE_LOST"


async def test_all_groups_and_all_events_are_listed(buffer: Buffer) -> None:
    await buffer.submit_prompts("train", text_prompts(*NAMES))
    await produce(buffer, 6)
    found, token = list[str](), ""
    while True:
        page = await buffer.list_groups("train", page_size=5, page_token=token)
        found += [group.group_id for group in page.groups]
        token = page.next_page_token
        if not token:
            break
    assert len(found) == len(set(found)) == len(NAMES)
    kinds: Counter[str] = Counter()
    async for event in buffer.watch("train"):
        kinds[event.kind] += 1
        if kinds["put"] == 6:
            break
    assert (kinds["submitted"], kinds["leased"]) == (len(NAMES), 6)
    assert [config.groups_per_step for config in await buffer.list_streams()] == [6]


async def test_shards_whose_epochs_differ_agree_at_the_next_rewind() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(served_buffer(MemoryStore())) for _ in range(2)]
        buffer = await stack.enter_async_context(ShardedBuffer([server.address for _, server in servers]))
        await buffer.create_stream(STREAM)
        await buffer.shards[1].rewind("train", 0)
        await buffer.shards[1].rewind("train", 0)
        assert (await buffer.rewind("train", 0)).epoch == 4
        assert [(await shard.stats("train")).epoch for shard in buffer.shards] == [4, 4]
        with refused(InvalidArgument, "2 shards"):
            await buffer.create_stream(pb.StreamConfig(name="small", n_samples_per_prompt=1, groups_per_step=1))


@pytest.mark.timeout(600)
async def test_a_shard_that_is_down_delays_its_groups_and_loses_none(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(30)))
    folders = [tmp_path / str(k) for k in range(2)]
    processes: list[BufferProcess] = []
    for k, folder in enumerate(folders):
        folder.mkdir()
        section = BufferSection(max_staleness=1, buffer_shards=2, buffer_shard=k)
        processes.append(BufferProcess(folder, prompts, buffer=section))
    for process in processes:
        await process.start()
    try:
        async with ShardedBuffer([process.address for process in processes]) as buffer:
            epoch = (await buffer.rewind("train", 0)).epoch
            before = await produce(buffer, 4)
            await processes[1].kill()
            alone = await produce(buffer, 2)
            assert {int(group_id.rpartition("/")[2]) % 2 for group_id in alone} == {0}
            batch = asyncio.create_task(buffer.lease_batch("train", epoch, 0, timeout_seconds=60))
            await processes[1].start()
            groups = [group.group_id for group in (await batch).groups]
            assert sorted(groups) == sorted(before)
            ids = [sample.sample_id for group in (await batch).groups for sample in group.samples]
            assert len(await buffer.fetch_samples("train", ids)) == len(ids)
            assert await buffer.consume("train", epoch, 0, (await batch).digest) == 1
            await buffer.set_policy_version("train", epoch, 1)
            await produce(buffer, 6)
            listed = list((await buffer.list_groups("train", page_size=100)).groups)
            listed += (await buffer.list_groups("train", page_token="1:", page_size=100)).groups
            walked = {group.group_id: group.prompt.prompt_id for group in listed}
            assert walked == {f"train/{i}": f"prompts.jsonl:{i % 30 + 1}@{i // 30}" for i in range(len(walked))}
    finally:
        for process in processes:
            await process.kill()
