"""kill -9 of a buffer that works: nothing acknowledged is lost, nothing consumed twice, none skipped."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import pytest

from headrace.job.schema.services import BufferSection
from tests.chaos.workload import working
from tests.support.processes.buffer_server import BufferProcess

# `make chaos` asks for more.
NUM_KILLS = int(os.environ.get("HEADRACE_KILLS", "3"))
KILLS_PER_TRAINER = 3
_LARGE_CALL_BYTES = 1 << 9


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Fifty prompts, walked over and over."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(50)))
    return file


@pytest.mark.timeout(600 + 20 * NUM_KILLS)
async def test_nothing_acknowledged_is_lost_and_nothing_consumed_twice(tmp_path: Path, prompts: Path) -> None:
    buffer = BufferProcess(tmp_path, prompts, buffer=BufferSection(max_staleness=1))
    chance = random.Random(5)
    await buffer.start(large_call_bytes=_LARGE_CALL_BYTES)
    try:
        async with working(buffer, tmp_path) as workload:
            for kill in range(1, NUM_KILLS + 1):
                await workload.steps(1)
                if kill % KILLS_PER_TRAINER == 0:
                    workload.hand_over()
                await asyncio.sleep(chance.uniform(0.0, 0.1))  # a kill in the middle of whatever happens
                await buffer.kill()
                await buffer.start(large_call_bytes=_LARGE_CALL_BYTES)
            await workload.steps(2)
        print(
            f"{NUM_KILLS} kills, {len(workload.told.acknowledged)} samples acknowledged, "
            f"{workload.told.num_read} read bit for bit"
        )
        assert len(workload.told.fenced) == NUM_KILLS // KILLS_PER_TRAINER
        assert all("a newer trainer opened epoch" in message for message in workload.told.fenced)
    finally:
        await buffer.kill()
