"""How long rollout waits for scores."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headrace.rpc.net import free_port
from services.rollout.scoring import SampleScorer
from tests.support.fakes.memory_ledger import lease
from tests.support.ledgers.buffer_samples import completed_sample


async def test_a_dead_reward_service_holds_a_group_for_the_stated_time_and_no_longer() -> None:
    """Its patience and twice an item's seconds, though one call alone may take longer."""
    scorer = SampleScorer(f"127.0.0.1:{free_port()}", item_seconds=0.1, patience_seconds=0.3, call_seconds=600.0)
    async with asyncio.timeout(60):
        (failed,) = await scorer.score([replace(completed_sample(lease(0), 0, 0), reward=None)])
    await scorer.close()
    assert failed.failure is not None
    assert failed.failure.reason == "REWARD_UNAVAILABLE"
    assert "did not score for 0.5 s" in failed.failure.message
