"""A rollout service whose samples follow from prompt and policy version alone, and whose engine takes real weights.

Publication is the real one (receiver, fleet, a gloo broadcast into an engine without a model). Production is one lease
after the other, so a run's batches are the same however often its trainer dies.

`python -m tests.support.fakes.certain_rollout ADDRESS BUFFER` serves and produces until it is killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.open import open_buffer
from headrace.errors import HeadraceError
from headrace.trajectory import PolicyRange, Sample, Status
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.process import EngineFactory
from services.rollout.engine_memory import EngineMemory
from services.rollout.metrics import RolloutMetrics
from services.rollout.publication.receiver import Receiver
from services.rollout.server import RolloutServicer, engine_to_proto
from services.rollout.service import RolloutParts
from tests.support.fakes.fake_fleet import RememberedRouting, served_rollout
from tests.support.fakes.gloo_engine import GlooEngine

VOCAB_SIZE = 300
Change = Callable[[buffer_pb2.GroupPut], buffer_pb2.GroupPut]


@dataclass
class CertainRollout:
    """What a test sees of it."""

    address: str
    fleet: Fleet
    starting: asyncio.Task[None]
    """Engines; it raises what keeps one from its first start, as the real service does."""

    @property
    def engine(self) -> GlooEngine:
        """The only one, where it is part of the test's process."""
        process = self.fleet.engines[0].process
        assert isinstance(process, GlooEngine)
        return process


@dataclass
class _Parts:
    fleet: Fleet
    receiver: Receiver
    engine_memory: EngineMemory | None
    metrics: RolloutMetrics

    def require_engines(self) -> None:
        """There are some."""


class _Servicer(RolloutServicer):
    async def JoinRun(self, request: pb.JoinRunRequest, context: Any) -> pb.JoinRunResponse:
        return pb.JoinRunResponse()  # its own run

    async def GetFleet(self, request: pb.GetFleetRequest, context: Any) -> pb.GetFleetResponse:
        fleet = self._parts.fleet
        return pb.GetFleetResponse(
            engines=[engine_to_proto(engine) for engine in fleet.engines],
            policy_version=fleet.policy_version,
            memory_released=self._parts.engine_memory is not None and self._parts.engine_memory.is_trainers,
        )


class _Production:
    """It goes on: its samples need no engine."""

    def pause(self, by: str) -> None: ...

    def resume(self, by: str) -> None: ...


@asynccontextmanager
async def certain_rollout(
    build: EngineFactory = lambda _: GlooEngine(),
    num_engines: int = 1,
    address: str = "127.0.0.1:0",
    weights_root: Path | None = None,
    *,
    shares_devices: bool = False,
) -> AsyncIterator[CertainRollout]:
    """Serves on a free port unless told another; produce with `produce`."""
    fleet = Fleet(num_engines, 1, build, RememberedRouting(), FleetTiming(start_seconds=120))
    receiver = Receiver(fleet, weights_root)
    turn = EngineMemory(fleet, _Production(), receiver) if shares_devices else None
    starting = asyncio.create_task(fleet.start())
    if turn is None:
        await starting
    parts = _Parts(fleet, receiver, turn, RolloutMetrics(CollectorRegistry()))
    try:
        async with served_rollout(_Servicer(cast(RolloutParts, parts)), address) as served_at:
            yield CertainRollout(served_at, fleet, starting)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await parts.receiver.close()
        await fleet.stop()


def allow(supply: asyncio.Semaphore, groups: int) -> None:
    """So many more may be made: a run whose groups are counted waits where a test wants it to."""
    for _ in range(groups):
        supply.release()


async def produce(
    buffer_address: str, supply: asyncio.Semaphore | None = None, change: Change = lambda put: put
) -> None:
    """Leases, makes, changes and puts one group at a time, until cancelled; as many as the supply allows."""
    async with open_buffer(buffer_address) as client:
        while True:
            if supply:
                await supply.acquire()
            try:
                reply = await client.lease_groups("train", "certain", 1, wait_seconds=1.0)
                if reply.leases:
                    await client.put_groups([change(_group(reply.leases[0]))])
                elif supply:
                    supply.release()
            except HeadraceError:  # the buffer starts or ends
                await asyncio.sleep(0.1)


def _group(lease: buffer_pb2.GroupLease) -> buffer_pb2.GroupPut:
    samples = [_sample(lease, index).pack() for index in range(lease.n_samples)]
    return buffer_pb2.GroupPut(
        lease_id=lease.lease_id, group_id=lease.group_id, outcome=buffer_pb2.PUT_OUTCOME_COMPLETE, samples=samples
    )


def _sample(lease: buffer_pb2.GroupLease, index: int) -> Sample:
    """Lengths, tokens, log-probs and reward: all from the prompt, the version and the index."""
    text = f"{lease.prompt.prompt_id}/{lease.policy_version}/{index}"
    random = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
    prompt, response = int(random.integers(3, 12)), int(random.integers(2, 16))
    return Sample(
        sample_id=f"{lease.group_id}/{lease.attempt}/{index}",
        group_id=lease.group_id,
        index=index,
        prompt=lease.prompt.text,
        response="",
        tokens=random.integers(3, VOCAB_SIZE, prompt + response).astype(np.int32),
        loss_mask=np.ones(response, np.uint8),
        rollout_log_probs=random.uniform(-6.5, -5.0, response).astype(np.float32),
        status=Status.COMPLETED,
        reward=float(random.normal()),
        policy_ranges=[PolicyRange(lease.policy_version, 0, response)],
    )


async def main(address: str, buffer_address: str) -> None:
    async with certain_rollout(address=address):
        await produce(buffer_address)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
