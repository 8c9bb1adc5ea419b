"""`python -m tests.chaos.stopping_process trainer|producer ADDRESS`: works until it holds something, then stops itself.

Whoever continues it (SIGCONT) hears on stdout what the buffer said to what it did next.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from headrace.client.buffer import BufferClient
from headrace.errors import HeadraceError
from services.trainer.batch import Batch
from services.trainer.loop import train
from services.trainer.state import TrainState
from tests.support.buffer_samples import complete_put

NUM_STEPS = 3


class TrainerThatStops:
    """The loop's ledger, ranks, console and schedule; it stops in the middle of its second step."""

    num_steps = NUM_STEPS

    def __init__(self, buffer: BufferClient) -> None:
        self._buffer = buffer

    async def rewind(self, step: int) -> int:
        return (await self._buffer.rewind("train", step)).epoch

    async def lease_batch(self, epoch: int, step: int) -> Batch | None:
        reply = await self._buffer.try_lease_batch("train", epoch, step, wait_seconds=1.0)
        return Batch.of(reply) if reply.ready else None

    async def consume(self, epoch: int, step: int, digest: bytes) -> None:
        await self._buffer.consume("train", epoch, step, digest)

    async def commit(self, epoch: int, step: int) -> None:
        await self._buffer.commit("train", epoch, step)

    async def set_policy_version(self, epoch: int, policy_version: int) -> None:
        await self._buffer.set_policy_version("train", epoch, policy_version)

    async def restore(self) -> int:
        return 0

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        if step == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return {}

    async def is_served(self, state: TrainState) -> bool:
        return True

    async def publish(self, state: TrainState) -> dict[str, float]:
        return {}

    async def save(self, state: TrainState) -> None:
        pass

    async def export(self) -> None:
        pass

    async def before_step(self, state: TrainState) -> bool:
        return True

    async def evaluate(self, state: TrainState) -> None:
        pass

    def report(self, state: TrainState, metrics: dict[str, float]) -> None:
        pass

    def publishes(self, state: TrainState) -> bool:
        return True

    def saves(self, state: TrainState) -> bool:
        return False


async def trainer(address: str) -> None:
    """Trains a step, and stops with the second batch in its hands."""
    async with BufferClient(address) as buffer:
        everything = TrainerThatStops(buffer)
        await train(everything, everything, everything, everything)


async def producer(address: str) -> None:
    """Leases a group, and stops before it puts it."""
    async with BufferClient(address) as buffer:
        (lease,) = (await buffer.lease_groups("train", "stopped", 1, wait_seconds=10)).leases
        os.kill(os.getpid(), signal.SIGSTOP)
        renewed = await buffer.renew_leases([lease.lease_id])
        (result,) = await buffer.put_groups([complete_put(lease)])
        print("lost" if renewed.lost else "renewed", result.refused.reason, result.refused.message)


def main() -> int:
    role = {"trainer": trainer, "producer": producer}[sys.argv[1]]
    try:
        asyncio.run(role(sys.argv[2]))
    except HeadraceError as error:
        print(error.status.name, error.reason, error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
