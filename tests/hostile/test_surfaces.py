"""Every port of all four services under hostile bytes, while well-behaved clients go on: nothing ends, nobody waits.

HEADRACE_HOSTILE says how many; without it a thousand are sent to the services of `test_fuzz.py`, each in its turn.
HEADRACE_HOSTILE_SEED asks for others.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from headrace.rpc.net import free_port
from tests.hostile.servers.servers import buffer_process, reward_process, rollout_process, trainer_process
from tests.hostile.surfaces.siege import besiege, ports_of
from tests.hostile.wire import BUFFER, REWARD, ROLLOUT, TRAINER

NUM_ATTACKS = int(os.environ.get("HEADRACE_HOSTILE", "0"))
FRAGMENTS_OF_AN_ATTACK = 1 << 10
"""What a heap may hold besides the factor after all that was in it at once: 70 bytes for each request that a service
gets. Small objects lie in pages with others that stay (docs/security.md has what they held). 1,800 attacks, which are
100,000 requests, have 2 MiB."""
SEED = os.environ.get("HEADRACE_HOSTILE_SEED", "7")

pytestmark = [
    pytest.mark.timeout(600 + NUM_ATTACKS // 20),
    pytest.mark.skipif(not NUM_ATTACKS, reason="HEADRACE_HOSTILE says how many attacks; test_fuzz.py has some"),
]


async def test_hostile_bytes_on_every_port_end_nothing_and_hold_up_nobody(tmp_path: Path) -> None:
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
    port = free_port()
    rollout = rollout_process(tmp_path, buffer.address, reward.address, openai_port=port)
    try:
        await asyncio.gather(buffer.start(), reward.start(), trainer.start())
        await rollout.start()
        ports = [
            *ports_of(buffer, BUFFER),
            *ports_of(reward, REWARD),
            *ports_of(rollout, ROLLOUT, openai=f"127.0.0.1:{port}"),
            *ports_of(trainer, TRAINER),
        ]
        await besiege(ports, NUM_ATTACKS, SEED, slack_bytes=NUM_ATTACKS * FRAGMENTS_OF_AN_ATTACK)
    finally:
        for server in (rollout, trainer, reward, buffer):
            await server.kill()
