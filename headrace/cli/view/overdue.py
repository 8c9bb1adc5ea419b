"""What `headrace status` says of a batch that is overdue: the console's sentence, by the console's patience."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from typing import TypeVar

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.view.awaited import Patience, awaited
from headrace.client.open import open_buffer
from headrace.client.trainer import TrainerClient
from headrace.errors import HeadraceError
from headrace.rpc.call import call
from headrace.rpc.channel import connect
from headrace.run_folder import RunFolder

T = TypeVar("T")


async def overdue(folder: RunFolder, deadline_seconds: float) -> str | None:
    """None while no batch is awaited, or not yet for ten times as long as expected."""
    addresses = {name: entry.address for name, entry in folder.services().items()}
    if "trainer" not in addresses or not folder.job_file.is_file():
        return None
    async with TrainerClient(addresses["trainer"], deadline_seconds=deadline_seconds) as trainer:
        status = await _answer(trainer.status())
    if status is None or status.phase != trainer_pb2.PHASE_WAITING:
        return None
    patience = Patience(folder.job().run.first_batch_seconds)
    for seconds in _waits(folder):
        patience.waited(seconds)
    if not patience.is_over(status.step, status.waiting_seconds):
        return None
    fleet = await _answer(fleet_of(addresses["rollout"], deadline_seconds)) if "rollout" in addresses else None
    if "buffer" not in addresses:
        return awaited(status, fleet, None)
    async with open_buffer(addresses["buffer"], deadline_seconds=deadline_seconds) as buffer:
        return awaited(status, fleet, await _answer(buffer.stats("train")))


async def fleet_of(address: str, deadline_seconds: float) -> rollout_pb2.GetFleetResponse:
    """The rollout service's answer. Raises its error."""
    async with connect(address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        fleet: rollout_pb2.GetFleetResponse = await call(
            stub.GetFleet, rollout_pb2.GetFleetRequest(), deadline_seconds=deadline_seconds
        )
    return fleet


async def _answer(asked: Awaitable[T]) -> T | None:
    """None from a service that does not answer."""
    with suppress(HeadraceError):
        return await asked
    return None


def _waits(folder: RunFolder) -> Iterator[float]:
    """How long each step so far waited; none where the trainer's files are on another machine."""
    path = folder.path / "metrics.jsonl"
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):  # the last line may be half written
            row = json.loads(line)
            if "time/wait_seconds" in row:
                yield row["time/wait_seconds"]
