"""`python -m tests.support.processes.certain_rollout_process ADDRESS BUFFER` serves and produces until it is killed."""

from __future__ import annotations

import asyncio
import sys

from tests.support.fakes.certain_rollout import certain_rollout, produce


async def main(address: str, buffer_address: str) -> None:
    """Serves and produces until it is killed."""
    async with certain_rollout(address=address):
        await produce(buffer_address)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
