"""How many processes score: --reward-workers."""

from __future__ import annotations

import pytest

from headrace.hooks import section_args
from headrace.job.schema.services import RewardSection
from headrace.rpc.server import Listen
from services.reward.server import RewardServer


@pytest.mark.parametrize("count", [1, 3])
async def test_as_many_processes_score_as_reward_workers_says(count: int) -> None:
    section = RewardSection(reward_workers=count, rm_type="exact_match")
    server = await RewardServer.start(section, section_args(section), Listen("127.0.0.1:0"))
    try:
        assert len(server.pool.pids) == count
    finally:
        await server.stop(0)
