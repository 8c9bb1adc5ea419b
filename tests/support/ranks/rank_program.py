"""`python rank_program.py FOLDER`: a rank that meets the others, adds up their numbers, and loses rank 1 after that."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist

from headrace.process.exit_status import PEER_LOST
from services.trainer.control.channel import PeerLost
from services.trainer.control.ranks import open_channel
from services.trainer.megatron.parallel import Layout
from services.trainer.megatron.rendezvous import join, own_host
from services.trainer.weights.weight_group import WeightGroup
from tests.support.processes.listening import listening


def meet(folder: Path, rank: int, world_size: int) -> None:
    join(rank, world_size, "gloo", datetime.timedelta(minutes=10))
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    (folder / f"rank-{rank}").write_text(" ".join([f"{total.item():g}", *(os.environ[name] for name in names)]))


async def main(folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loop, compute = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    await loop.run_in_executor(compute, meet, folder, rank, world_size)
    layout = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))
    channel = await open_channel(cast(Layout, layout), compute)
    group = WeightGroup("weights", own_host(), "gloo", 60.0)
    (folder / f"listening-{rank}").write_text(json.dumps(listening([os.getpid()])))
    group.drop()
    await loop.run_in_executor(compute, dist.barrier)
    if rank == 1:
        print("rank 1 says its last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    try:
        await channel.guard(waits_for_ever())
    except PeerLost as error:
        print(error.message, file=sys.stderr, flush=True)
        os._exit(PEER_LOST)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
