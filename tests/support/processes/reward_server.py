"""A reward service in this process, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.client.reward import RewardClient
from headrace.hooks import section_args
from headrace.job.schema.services import RewardSection
from headrace.rpc.server import Listen
from headrace.run_folder import RunFolder
from services.reward.server import RewardServer


@asynccontextmanager
async def served_reward(
    of_evaluations: Sequence[str] = (), folder: Path | None = None, /, **leaves: Any
) -> AsyncIterator[RewardClient]:
    """One worker, where the leaves of the job's section do not say otherwise."""
    section = RewardSection.model_validate({"reward_workers": 1, **leaves})
    args, listen = section_args(section), Listen("127.0.0.1:0")
    server = await RewardServer.start(
        section, args, listen, of_evaluations=of_evaluations, folder=RunFolder(folder) if folder else None
    )
    try:
        async with RewardClient(server.rpc.address) as client:
            yield client
    finally:
        await server.stop(1)
