"""How ranks find each other: through torchrun's environment, or through a file that rank 0 leaves for the others.

HEADRACE_RENDEZVOUS names the file, in a folder that all machines share; its name is new at every start of the ranks.
Rank 0 listens on a port that the system gives and writes `host port`. So no port is chosen before it is bound, and no
machine's name has to be known before its process runs.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from pathlib import Path

import torch.distributed as dist

from headrace.errors import ConfigError, DeadlineExceeded

RENDEZVOUS = "HEADRACE_RENDEZVOUS"
_WAIT = datetime.timedelta(minutes=5)
_ASK_AGAIN_SECONDS = 0.05


def join(rank: int, world_size: int, backend: str, timeout: datetime.timedelta) -> None:
    """torch.distributed's default group. Raises DeadlineExceeded when rank 0 does not appear."""
    if RENDEZVOUS in os.environ:
        store = _meet(Path(os.environ[RENDEZVOUS]), rank, world_size)
    elif "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
        return
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def own_host() -> str:
    """Where the other ranks reach this one: loopback when all of them are on this machine."""
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        return "127.0.0.1"
    host = socket.gethostbyname(socket.gethostname())
    if host.startswith("127."):
        raise ConfigError(
            f"this machine's name {socket.gethostname()} means {host}, which other machines cannot reach: "
            "set MASTER_ADDR to an address of the first machine"
        )
    return host


def _meet(file: Path, rank: int, world_size: int) -> dist.TCPStore:
    if rank == 0:
        host = own_host()
        store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=_WAIT)
        part = file.with_name(f"{file.name}.part")
        part.write_text(f"{host} {store.port}")
        part.replace(file)
        return store
    host, port = _read(file).split()
    return dist.TCPStore(host, int(port), world_size, is_master=False, timeout=_WAIT)


def _read(file: Path) -> str:
    end = time.monotonic() + _WAIT.total_seconds()
    while not file.exists():
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"rank 0 did not write {file} within {_WAIT.total_seconds():.0f} s: see its log, and whether all "
                "machines share this folder"
            )
        time.sleep(_ASK_AGAIN_SECONDS)
    return file.read_text()
