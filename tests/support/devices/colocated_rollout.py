"""`python -m tests.support.devices.colocated_rollout ADDRESS DEVICE WEIGHTS LOGS`: rollout on a device that is shared.

Its fleet, turns and publications are the real ones; its engine is a process without a model, and it produces nothing.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from headrace.rpc.log import configure_logging
from tests.support.devices.weights_engine import WeightsEngineProcess
from tests.support.fakes.certain_rollout import certain_rollout


async def main(address: str, device: str, weights: str, logs: str) -> None:
    """Serves until it is killed, or an engine cannot be started for the first time."""
    configure_logging("rollout")

    def build(number: int) -> WeightsEngineProcess:
        return WeightsEngineProcess(number, Path(device), Path(logs) / f"engine-{number}.log")

    async with certain_rollout(build, address=address, weights_root=Path(weights), shares_devices=True) as it:
        await it.starting
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
