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
from tests.support.ledgers.buffer_samples import complete_put

NUM_STEPS = 3


async def trainer(address: str) -> None:
    """Trains three steps, and stops in the middle of the second with its batch in its hands."""
    async with BufferClient(address) as buffer:
        epoch = (await buffer.rewind("train", 0)).epoch
        for step in range(NUM_STEPS):
            batch = await buffer.lease_batch("train", epoch, step)
            if step == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            await buffer.consume("train", epoch, step, batch.digest)
            await buffer.set_policy_version("train", epoch, step + 1)
        await buffer.commit("train", epoch, NUM_STEPS)


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
        print(error.status, error.reason, error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
