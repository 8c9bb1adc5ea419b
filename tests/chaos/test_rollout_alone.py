"""A rollout service whose buffer or reward service is away waits, and no sample fails for it.

All three are processes of their own. `make chaos` keeps them away for half a minute (HEADRACE_AWAY_SECONDS).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.job.schema.production import DataSection
from headrace.job.schema.services import BufferSection
from tests.chaos.test_peers_away import AWAY_SECONDS, stopped
from tests.hostile.servers.servers import ServerProcess, reward_process, rollout_process
from tests.support.processes.buffer_server import BufferProcess

MORE_GROUPS = 4
LONG = "HEADRACE_AWAY_SECONDS" in os.environ


@pytest.mark.skipif(not LONG, reason="long: make chaos sets HEADRACE_AWAY_SECONDS")
@pytest.mark.timeout(1200)
async def test_a_rollout_service_without_its_buffer_or_its_reward_service_waits_and_fails_no_sample(
    tmp_path: Path,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}", "label": str(i)}) + "\n" for i in range(50)))
    buffer = BufferProcess(
        tmp_path,
        prompts,
        constants=["services.buffer.build:LEASE_SECONDS=10.0"],  # shorter than an absence
        buffer=BufferSection(max_staleness=10_000),
        data=DataSection(prompt_data=(str(prompts),), label_key="label"),
    )
    reward = reward_process(tmp_path)
    rollout = rollout_process(tmp_path, buffer.address, reward.address)
    async with AsyncExitStack() as ending, BufferClient(buffer.address) as client:
        ending.push_async_callback(buffer.kill)
        await buffer.start()
        await reward.start()
        ending.push_async_callback(reward.kill)
        await rollout.start()
        ending.push_async_callback(rollout.end, signal.SIGTERM)
        await more_groups(client, rollout)

        async with stopped(buffer.pid):
            pass
        await more_groups(client, rollout)
        await buffer.kill()
        await asyncio.sleep(AWAY_SECONDS)
        await buffer.start()
        await more_groups(client, rollout)

        async with stopped(reward.pid):
            pass
        await more_groups(client, rollout)
        await reward.kill()
        await asyncio.sleep(AWAY_SECONDS)
        await reward.start()
        await more_groups(client, rollout)

        made = (await client.stats("train")).production
        assert made.num_samples > 0
        assert made.num_failed == 0
        kinds = [event.kind for event in await history(client) if event.group_id]
        assert "lease_expired" not in kinds
    assert '"reward_unavailable"' in rollout.log
    assert "Traceback" not in rollout.log


async def more_groups(client: BufferClient, rollout: ServerProcess) -> None:
    """Waits for more than could have been on their way."""
    before = (await client.stats("train")).groups["READY"]
    while (await client.stats("train")).groups["READY"] < before + MORE_GROUPS:
        assert rollout.is_alive, rollout.log[-3000:]
        await asyncio.sleep(0.1)  # another party's state


async def history(client: BufferClient) -> list[pb.LedgerEvent]:
    """All events up to the newest that a group has."""
    end = (await client.list_groups("train", page_size=1)).groups[0].position
    found: list[pb.LedgerEvent] = []
    async for event in client.watch("train"):
        found.append(event)
        if event.position >= end:
            break
    return found
