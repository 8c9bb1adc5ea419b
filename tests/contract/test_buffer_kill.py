"""kill -9 of a buffer under load: nothing acknowledged is lost, nothing consumed twice, no prompt skipped."""

from __future__ import annotations

import asyncio
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.client.buffer import BufferClient
from tests.support.buffer_samples import complete_put
from tests.support.buffer_server import BufferProcess

# `make chaos` asks for more.
NUM_KILLS = int(os.environ.get("HEADRACE_KILLS", "8"))
GROUPS_PER_STEP = 4


@dataclass
class Records:
    """What the clients were told, to be held against the ledger."""

    acknowledged: dict[str, bytes] = field(default_factory=dict)
    batches: dict[int, list[str]] = field(default_factory=dict)
    consumed: list[str] = field(default_factory=list)
    prompts: dict[str, str] = field(default_factory=dict)
    stepped: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


async def produce(client: BufferClient, name: str, records: Records) -> None:
    """Leases and puts until told to stop; retries are the client's."""
    while not records.stopping.is_set():
        reply = await client.lease_groups("train", name, 2, wait_seconds=0.2)
        if not reply.leases:
            continue
        for lease in reply.leases:
            assert records.prompts.setdefault(lease.group_id, lease.prompt.prompt_id) == lease.prompt.prompt_id
        puts = [complete_put(lease) for lease in reply.leases]
        for put, result in zip(puts, await client.put_groups(puts), strict=True):
            if not result.HasField("refused"):
                records.acknowledged.update((s.envelope.sample_id, s.envelope.digest) for s in put.samples)


async def train(client: BufferClient, records: Records) -> int:
    """Consumes step after step; returns the steps done."""
    epoch, step = (await client.rewind("train", 0)).epoch, 0
    while not records.stopping.is_set():
        reply = await client.try_lease_batch("train", epoch, step, wait_seconds=0.2)
        if not reply.ready:
            continue
        ids = [s.sample_id for g in reply.groups for s in g.samples]
        assert len(await client.fetch_samples("train", ids)) == len(ids)
        await client.consume("train", epoch, step, reply.digest)
        records.batches[step] = [g.group_id for g in reply.groups]
        records.consumed += ids
        records.stepped.set()
        step += 1
        await client.set_policy_version("train", epoch, step)
    return step


@pytest.mark.timeout(30 * NUM_KILLS)
async def test_nothing_acknowledged_is_lost_and_nothing_consumed_twice(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(50)))
    process = BufferProcess(tmp_path, prompts)
    records, chance = Records(), random.Random(5)
    await process.start()
    try:
        async with BufferClient(process.address) as client, asyncio.timeout(15 * NUM_KILLS):
            async with asyncio.TaskGroup() as tasks:
                for name in ("p1", "p2"):
                    tasks.create_task(produce(client, name, records))
                trainer = tasks.create_task(train(client, records))
                for _ in range(NUM_KILLS):
                    await progress(records)
                    await asyncio.sleep(chance.uniform(0.0, 0.05))  # a kill in the middle of whatever happens
                    await process.kill()
                    await process.start()
                await progress(records)
                records.stopping.set()
            await check(client, records, trainer.result())
    finally:
        await process.kill()


async def progress(records: Records) -> None:
    """Waits for two more steps."""
    for _ in range(2):
        records.stepped.clear()
        await records.stepped.wait()


async def check(client: BufferClient, records: Records, num_steps: int) -> None:
    """The ledger's own record and history against the clients'."""
    assert num_steps >= 2 * NUM_KILLS
    groups, token = {}, ""
    while page := await client.list_groups("train", page_size=200, page_token=token):
        groups.update({g.group_id: g for g in page.groups})
        token = page.next_page_token
        if not token:
            break
    kept = {s.sample_id: s.digest for g in groups.values() for s in g.samples}
    assert records.acknowledged.items() <= kept.items()
    assert len(set(records.consumed)) == len(records.consumed)
    for step, ids in records.batches.items():
        assert [groups[i].step for i in ids] == [step] * GROUPS_PER_STEP
    walked = [groups[f"train/{i}"].prompt.prompt_id for i in range(len(groups))]
    assert walked == [f"prompts.jsonl:{i % 50 + 1}@{i // 50}" for i in range(len(groups))]
    position = (await client.stats("train")).prompts_read
    assert position == len(groups)
    await check_history(client, num_steps)


async def check_history(client: BufferClient, num_steps: int) -> None:
    """Every position once, every group consumed once, every step by a whole batch."""
    consumed: list[tuple[str, int]] = []
    expected = 1
    async for event in client.watch("train"):
        assert event.position == expected
        expected += 1
        if event.kind == "consumed":
            consumed.append((event.group_id, event.step))
        if len(consumed) == num_steps * GROUPS_PER_STEP:
            break
    assert len({group_id for group_id, _ in consumed}) == len(consumed)
