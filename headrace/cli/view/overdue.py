"""Finds out for `headrace status` whether a batch is overdue, by the console's rule and in its words."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.view.awaited import Patience, awaited
from headrace.client.open import open_buffer, open_rollout
from headrace.client.trainer import TrainerClient
from headrace.errors import HeadraceError
from headrace.run_folder import RunFolder, fields_in

T = TypeVar("T")


async def overdue(folder: RunFolder, deadline_seconds: float) -> str | None:
    """None while no batch is awaited, or not yet ten times as long as expected."""
    addresses = {name: entry.address for name, entry in folder.services().items()}
    if "trainer" not in addresses or not folder.job_file.is_file():
        return None
    async with TrainerClient(addresses["trainer"], deadline_seconds=deadline_seconds) as trainer:
        status = await _answer(trainer.status())
    if status is None or status.phase != trainer_pb2.PHASE_WAITING:
        return None
    patience = Patience()
    for fields in fields_in(folder.metrics):
        if "time/wait_seconds" in fields:
            patience.waited(fields["time/wait_seconds"])
    if not patience.is_over(status.step, status.waiting_seconds):
        return None
    fleet = None
    if "rollout" in addresses:
        async with open_rollout(addresses["rollout"], deadline_seconds=deadline_seconds) as rollout:
            fleet = await _answer(rollout.get_fleet())
    if "buffer" not in addresses:
        return awaited(status, fleet, None)
    async with open_buffer(addresses["buffer"], deadline_seconds=deadline_seconds) as buffer:
        return awaited(status, fleet, await _answer(buffer.stats("train")))


async def _answer(asked: Awaitable[T]) -> T | None:
    """None when the service does not answer."""
    with suppress(HeadraceError):
        return await asked
    return None
