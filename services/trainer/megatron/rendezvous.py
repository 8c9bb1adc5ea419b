"""Ranks find each other through torchrun's environment, or through a file that rank 0 leaves for the others.

HEADRACE_RENDEZVOUS names the file, in a folder that all machines share; its name is new at every start of the ranks.
Rank 0 listens on a port that the system gives and writes `host port token`. So no port is chosen before it is bound,
and no machine's name has to be known before its process runs. Only this user can read the file, and without the token
nobody finds the keys that the ranks use.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import time
from pathlib import Path

import torch.distributed as dist

from headrace.errors import ConfigError, DeadlineExceeded
from headrace.rpc.net import Address, host_towards, interface_of
from headrace.whole_file import replacing

RENDEZVOUS = "HEADRACE_RENDEZVOUS"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_WAIT = datetime.timedelta(minutes=5)
_ASK_AGAIN_SECONDS = 0.05


def join(rank: int, world_size: int, backend: str, timeout: datetime.timedelta) -> None:
    """torch.distributed's default group. Raises DeadlineExceeded when rank 0 does not appear."""
    if RENDEZVOUS in os.environ:
        store = _meet(Path(os.environ[RENDEZVOUS]), rank, world_size)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent keeps the store
        listen_towards(os.environ["MASTER_ADDR"])
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
        return
    elif "MASTER_ADDR" in os.environ:
        store = _at(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world_size)
    else:
        store = listening_store("127.0.0.1", _WAIT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def listening_store(host: str, timeout: datetime.timedelta, port: int = 0) -> dist.TCPStore:
    """A store that listens at `host` and nowhere else: torch's own listens on every interface."""
    found = listener(host, port)
    port = found.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=found.detach()
    )


def listener(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at `host` and nowhere else. Raises ConfigError where other machines cannot reach it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.create_server((host, port), family=family, backlog=1024)
    address = found.getsockname()[0]
    if address.startswith("127.") and host not in (address, "localhost") and not _on_one_machine():
        found.close()
        raise ConfigError(
            f"{host} means {address} on this machine, which other machines cannot reach: set MASTER_ADDR to an address "
            "of the first machine"
        )
    return found


def own_host() -> str:
    """The host at which the other ranks reach this one: loopback when all of them are on this machine."""
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    if _on_one_machine():
        return "127.0.0.1"
    host = socket.gethostbyname(socket.gethostname())
    if host.startswith("127."):
        raise ConfigError(
            f"this machine's name {socket.gethostname()} means {host}, which other machines cannot reach: "
            "set MASTER_ADDR to an address of the first machine"
        )
    return host


def listen_towards(host: str) -> None:
    """Has gloo listen on the interface that leads to the first machine, unless GLOO_SOCKET_IFNAME names another.

    By itself it listens where this machine's own name points, which is loopback on many. On one machine that will do.
    """
    if _on_one_machine() or _GLOO_INTERFACE in os.environ:
        return
    if (interface := interface_of(host_towards(Address(host, 9)))) is not None:
        os.environ[_GLOO_INTERFACE] = interface


def _on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def _at(host: str, port: int, rank: int, world_size: int) -> dist.TCPStore:
    listen_towards(host)
    if rank == 0:
        return listening_store(host, _WAIT, port)
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=_WAIT)


def _meet(file: Path, rank: int, world_size: int) -> dist.Store:
    if rank == 0:
        host, token = own_host(), secrets.token_hex(16)
        store = listening_store(host, _WAIT)
        listen_towards(host)
        with (
            replacing(file) as draft,
            open(draft, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as text,
        ):
            text.write(f"{host} {store.port} {token}")
        return dist.PrefixStore(token, store)
    host, port, token = _read(file).split()
    listen_towards(host)
    return dist.PrefixStore(token, dist.TCPStore(host, int(port), world_size, is_master=False, timeout=_WAIT))


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
