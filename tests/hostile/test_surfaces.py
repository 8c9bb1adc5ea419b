"""All four services at once under odd calls, while health is asked: no INTERNAL, no traceback, nobody waits.

HEADRACE_HOSTILE says how many; without it some are made to the services of `test_fuzz.py`, each in its turn.
HEADRACE_HOSTILE_SEED asks for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest

from tests.hostile.odd_calls import require_no_bug
from tests.hostile.servers.servers import buffer_process, reward_process, rollout_process, trainer_process
from tests.hostile.wire import BUFFER, REWARD, ROLLOUT, TRAINER
from tests.support.processes.health_probe import HealthProbe

NUM_ATTACKS = int(os.environ.get("HEADRACE_HOSTILE", "0"))
SEED = os.environ.get("HEADRACE_HOSTILE_SEED", "7")

pytestmark = [
    pytest.mark.timeout(600 + NUM_ATTACKS // 20),
    pytest.mark.skipif(not NUM_ATTACKS, reason="HEADRACE_HOSTILE says how many attacks; test_fuzz.py has some"),
]


async def test_odd_calls_end_nothing_and_hold_up_nobody(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(200)))
    job = {
        "data": {"prompt_data": [str(tmp_path / "prompts.jsonl")]},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        "buffer": {"max_staleness": 2, "prompt_root": str(tmp_path)},
    }
    buffer, reward, trainer = (
        buffer_process(tmp_path, job),
        reward_process(tmp_path),
        trainer_process(tmp_path, step_seconds=1.0),
    )
    rollout = rollout_process(tmp_path, buffer.address, reward.address)
    services = {buffer: BUFFER, reward: REWARD, rollout: ROLLOUT, trainer: TRAINER}
    try:
        await asyncio.gather(buffer.start(), reward.start(), trainer.start())
        await rollout.start()
        with contextlib.ExitStack() as watching:
            healths = [watching.enter_context(HealthProbe(each.address, lambda pid=each.pid: pid)) for each in services]
            share = NUM_ATTACKS // len(services)
            await asyncio.gather(*(require_no_bug(each, service, share, SEED) for each, service in services.items()))
        assert all(health.num_answers > 0 and health.num_refused == 0 for health in healths)
        assert all(each.is_alive for each in services)
    finally:
        for server in (rollout, trainer, reward, buffer):
            await server.kill()
