"""Asks a run's services how they are, once a second, for a view. Silence is no error: services restart."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.cli.view.run_view import RunView
from headrace.client.open import open_buffer
from headrace.client.trainer import TrainerClient
from headrace.errors import HeadraceError
from headrace.job.schema.job import Job
from headrace.launch.specs import address_of
from headrace.rpc.call import call
from headrace.rpc.channel import connect

_PAUSE_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0


async def follow(job: Job, view: RunView) -> None:
    """Until it is cancelled."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_progress(job, view))
        tasks.create_task(_status(job, view))
        tasks.create_task(_fleet(job, view))
        tasks.create_task(_stats(job, view))


async def _progress(job: Job, view: RunView) -> None:
    step = 0
    async with TrainerClient(address_of(job, "trainer")) as trainer:
        while True:
            with suppress(HeadraceError):  # it starts or restarts: ask again
                async for row in trainer.watch_progress(step):
                    step = row.step  # it may have another row: evaluation comes after training
                    view.on_progress(row)
            await asyncio.sleep(_PAUSE_SECONDS)


async def _status(job: Job, view: RunView) -> None:
    async with TrainerClient(address_of(job, "trainer"), deadline_seconds=_PATIENCE_SECONDS) as trainer:
        while True:
            with suppress(HeadraceError):  # it starts or restarts: ask again
                view.on_status(await trainer.status())
            await asyncio.sleep(_PAUSE_SECONDS)


async def _stats(job: Job, view: RunView) -> None:
    async with open_buffer(address_of(job, "buffer"), deadline_seconds=_PATIENCE_SECONDS) as buffer:
        while True:
            with suppress(HeadraceError):  # it starts or restarts: ask again
                view.on_stats(await buffer.stats("train"))
            await asyncio.sleep(_PAUSE_SECONDS)


async def _fleet(job: Job, view: RunView) -> None:
    async with connect(address_of(job, "rollout")) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        while True:
            with suppress(HeadraceError):  # it starts or restarts: ask again
                request = rollout_pb2.GetFleetRequest()
                view.on_fleet(await call(stub.GetFleet, request, deadline_seconds=_PATIENCE_SECONDS))
            await asyncio.sleep(_PAUSE_SECONDS)
