"""Ranks find each other through MASTER_ADDR, or through a file that rank 0 leaves for the others.

MASTER_ADDR and MASTER_PORT are where rank 0 listens. The others join when their machines have started them, and say
what they were started with. When all are there with rank 0's own options, or one has others, rank 0 says so to all.
Until then a rank that died may come again, and of two processes with the same rank the last one counts; who comes
later is told to come again.

HEADRACE_RENDEZVOUS names the file, in a folder that all machines share; its name is new at every start of the ranks.
Rank 0 listens on a port that the system gives and writes `host port token`. So no port is chosen before it is bound,
and no machine's name has to be known before its process runs. Only this user can read the file, and without the token
nobody finds the keys that the ranks use.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import secrets
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

from headrace.disk import atomic_write
from headrace.errors import ConfigError, DeadlineExceeded, HeadraceError, Unavailable
from headrace.process.computing import gloo_at
from headrace.rpc.net import Address, host_towards, resolved

RENDEZVOUS = "HEADRACE_RENDEZVOUS"
_WAIT = datetime.timedelta(minutes=5)
_ASK_AGAIN_SECONDS = 0.1
_LAST_WORDS_SECONDS = 1.0
_OVER = "headrace-over"
_MOST_NAMED = 3
_VERDICTS: Mapping[str, type[HeadraceError]] = {each.__name__: each for each in (ConfigError, DeadlineExceeded)}


def join(
    rank: int, world_size: int, backend: str, timeout: datetime.timedelta, options: Mapping[str, str] | None = None
) -> None:
    """torch.distributed's default group.

    Raises DeadlineExceeded, or Unavailable, when somebody does not appear, and ConfigError when ranks that machines
    started by themselves have other `options` than rank 0.
    """
    if RENDEZVOUS in os.environ:
        store = _by_file(Path(os.environ[RENDEZVOUS]), rank, world_size)
    elif "MASTER_ADDR" in os.environ:
        place = Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        listen_towards(place.host)
        store = _at(place, rank, world_size, options or {})
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
    family = resolved(Address(host, port))[0][0]
    try:
        found = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise _cannot_listen(Address(host, port), error) from error
    address = found.getsockname()[0]
    if address.startswith("127.") and host not in (address, "localhost") and not on_one_machine():
        found.close()
        raise ConfigError(
            f"{host} means {address} on this machine, which other machines cannot reach: set MASTER_ADDR to an address "
            "of the first machine"
        )
    return found


def _cannot_listen(place: Address, error: OSError) -> HeadraceError:
    if error.errno == errno.EADDRINUSE:
        return Unavailable(
            f"{place} is taken: end the process that listens there (another machine 0?), or choose another "
            "--master-port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"{place.host} is no address of this machine, where rank 0 is: correct --master-addr, or this "
            "machine's --node-rank"
        )
    return Unavailable(f"rank 0 cannot listen on {place}: {error.strerror or error}")


def own_host() -> str:
    """The host at which the other ranks reach this one: loopback when all of them are on this machine."""
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    if on_one_machine():
        return "127.0.0.1"
    host = str(resolved(Address(socket.gethostname(), 0))[0][4][0])
    if Address(host, 0).is_loopback:
        raise ConfigError(
            f"this machine's name {socket.gethostname()} means {host}, which other machines cannot reach: "
            "set MASTER_ADDR to an address of the first machine"
        )
    return host


def on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def _at(place: Address, rank: int, world_size: int, options: Mapping[str, str]) -> dist.Store:
    store = listening_store(place.host, _WAIT, place.port) if rank == 0 else _store_of(place, world_size)
    try:
        if rank == 0:
            _admit_all(store, place, world_size, options)
        else:
            _ask_to_join(store, place, rank, options)
    except dist.DistStoreError as error:
        raise DeadlineExceeded(
            f"somebody is not at {place} after {_WAIT.total_seconds():.0f} s: see the log of rank 0, and start "
            "`headrace up trainer` on each machine with its own --node-rank"
        ) from error
    except dist.DistNetworkError as error:
        raise Unavailable(f"rank 0 at {place} ended while ranks were meeting: see its log") from error
    return store


def _admit_all(store: dist.Store, place: Address, world_size: int, options: Mapping[str, str]) -> None:
    """Called on rank 0. Raises ConfigError when a rank has other options, DeadlineExceeded when one is missing."""
    end = time.monotonic() + _WAIT.total_seconds()
    while (verdict := _verdict(store, place, world_size, options, time.monotonic() > end)) is None:
        time.sleep(_ASK_AGAIN_SECONDS)
    store.set(_OVER, verdict)
    if verdict:
        time.sleep(_LAST_WORDS_SECONDS)  # the others read it: the store ends with this process
    _heed(verdict)


def _verdict(
    store: dist.Store, place: Address, world_size: int, options: Mapping[str, str], is_late: bool
) -> str | None:
    """What rank 0 says to all: an error's class and message, or nothing when all are there. None: not yet."""
    here = [rank for rank in range(1, world_size) if store.check([_here(rank)])]
    for rank in here:
        if different := list(_differences(options, json.loads(store.get(_here(rank)))["options"])):
            more = f", and {len(different) - _MOST_NAMED} more" if len(different) > _MOST_NAMED else ""
            return (
                f"ConfigError rank {rank} was started with other options than rank 0 at {place}: "
                f"{', '.join(different[:_MOST_NAMED])}{more}: give all machines the same job"
            )
    absent = sorted({*range(1, world_size)} - {*here})
    if absent and is_late:
        return (
            f"DeadlineExceeded ranks {absent} are not at {place} after {_WAIT.total_seconds():.0f} s: start `headrace "
            "up trainer` on each machine with its own --node-rank, and see their logs"
        )
    return None if absent else ""


def _heed(verdict: str) -> None:
    if verdict:
        name, _, message = verdict.partition(" ")
        raise _VERDICTS[name](message)


def _ask_to_join(store: dist.Store, place: Address, rank: int, options: Mapping[str, str]) -> None:
    """Called on the others. Raises as rank 0 does, and ConfigError where another process has this one's number."""
    mine, is_late = json.dumps({"process": uuid.uuid4().hex, "options": dict(options)}), store.check([_OVER])
    if not is_late:
        store.set(_here(rank), mine)
    _heed(store.get(_OVER).decode())
    if is_late:
        raise Unavailable(
            f"the ranks at {place} have met without this rank {rank}: it waits for their next start. Where another "
            "machine has its number, give each its own --node-rank"
        )
    if store.get(_here(rank)).decode() != mine:
        raise ConfigError(
            f"another process came to {place} as rank {rank}: give each machine its own --node-rank",
            field="node_rank",
        )


def _differences(theirs: Mapping[str, str], mine: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            yield f"{name} {mine.get(name, 'absent')} in place of {theirs.get(name, 'absent')}"


def _here(rank: int) -> str:
    return f"headrace-rank-{rank}"


def _store_of(place: Address, world_size: int) -> dist.TCPStore:
    try:
        return dist.TCPStore(place.host, place.port, world_size, is_master=False, timeout=_WAIT)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise Unavailable(
            f"rank 0 is not at {place} ({_WAIT.total_seconds():.0f} s): start `headrace up trainer` on machine 0, or "
            "correct --master-addr and --master-port"
        ) from error


def listen_towards(host: str) -> None:
    """Has gloo listen on the way to `host`, the first machine, where not all ranks are on one.

    Raises Unavailable where there is no such way.
    """
    if not on_one_machine():
        os.environ.update(gloo_at(host_towards(Address(host, 1)), os.environ))


def _by_file(file: Path, rank: int, world_size: int) -> dist.Store:
    if rank == 0:
        host, token = own_host(), secrets.token_hex(16)
        listen_towards(host)
        store = listening_store(host, _WAIT)
        with (
            atomic_write(file) as draft,
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
