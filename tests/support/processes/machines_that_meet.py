"""`python -m tests.support.processes.machines_that_meet FOLDER MACHINES`: a rank each of several machines, on loopback.

MACHINES is JSON, a list of [meeting, rank, world_size, options, wait_seconds]; those of one meeting meet at one port.
Each is a process, forked when torch is loaded. The n-th writes how its meeting ended into FOLDER/n.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from headrace.errors import HeadraceError
from headrace.rpc.net import free_port
from services.trainer.megatron import rendezvous


def meet(rank: int, world_size: int, options: dict[str, str], wait_seconds: float) -> str:
    """What the rank says at the end."""
    rendezvous._WAIT = datetime.timedelta(seconds=wait_seconds)
    try:
        rendezvous.join(rank, world_size, "gloo", datetime.timedelta(seconds=60), options)
    except HeadraceError as error:
        return f"{type(error).__name__} {error.message}"
    dist.barrier()  # rank 0 has the store, which the others need until their groups are made
    return "met"


def main(folder: Path, machines: list[tuple[str, int, int, dict[str, str], float]]) -> None:
    """Returns when all have ended."""
    ports = {meeting: free_port() for meeting, *_ in machines}
    for number, (meeting, rank, world_size, options, wait_seconds) in enumerate(machines):
        if os.fork() == 0:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[meeting]), WORLD_SIZE=str(world_size))
            (folder / str(number)).write_text(meet(rank, world_size, options, wait_seconds))
            os._exit(0)
    for _ in machines:
        os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
