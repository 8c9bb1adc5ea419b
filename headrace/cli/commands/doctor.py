"""`headrace doctor`: looks at this machine, and says what mends each finding."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import click
import psutil
from rich.console import Console
from rich.table import Table

from headrace.cli.arg_types import PATH, RUNS, json_option, print_json
from headrace.cli.view.lines import print_no_wrap
from headrace.errors import FailedPrecondition
from headrace.installed import EXTRAS
from headrace.process.child import run_once
from headrace.process.linux import free_bytes
from headrace.process.scratch import SHARED_MEMORY

_GIB = 1 << 30
_LEAST_PYTHON = (3, 11)
_SYNCS = 20
_SLOW_SYNC_SECONDS = 0.02
"""A commit of the ledger waits for one; at 20 ms some 50 commits a second are left, each of many puts."""
_LEAST_FREE_DISK = 10 * _GIB
_LEAST_MEMORY = 4 * _GIB
_LEAST_SHARED_MEMORY = 1 * _GIB
_TORCH_SECONDS = 180.0
_OF_SERVICE = {
    "buffer": ("crc32c", "pyarrow"),
    "reward": ("math-verify", "reasoning-gym"),
    "rollout": ("sglang", "sglang-router", "transformers", "aiohttp"),
    "trainer": ("torch", "megatron-core", "safetensors"),
}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_ASK_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": [[gpu.name, gpu.total_memory] for gpu in gpus],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus and torch.distributed.is_nccl_available() else None,
}))
"""

State = Literal["ok", "warning", "problem"]
_COLOURS: dict[State, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what mends it."""

    what: str
    state: State
    found: str
    mends: str = ""


@click.command()
@click.option("--run-dir", type=PATH, default=RUNS, show_default=True, help="Where runs will be: its disk is tried.")
@click.option("--fast", is_flag=True, help="Do not import torch, which takes some seconds.")
@json_option
def doctor(run_dir: Path, fast: bool, as_json: bool) -> int:
    """Looks at Python, packages, devices, disk, memory, network and sandbox, and says what mends each finding.

    The exit code is 1 when something keeps a job from running here.
    """
    found: list[Finding] = []
    for look in _looks(run_dir, fast=fast):
        if not as_json and sys.stderr.isatty():
            print(f"\r\033[K{look.__name__.strip('_').replace('_', ' ')} …", end="", file=sys.stderr, flush=True)
        found += look()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if as_json:
        print_json(found)
    else:
        print_no_wrap(Console(), _table(found))
    return int(any(each.state == "problem" for each in found))


def _looks(run_dir: Path, *, fast: bool) -> Sequence[Callable[[], Iterator[Finding]]]:
    def disk() -> Iterator[Finding]:
        yield from _disk(run_dir)

    return (_python, _services, *(() if fast else (_torch,)), _memory, disk, _shared_memory, _ports, _proxies, _sandbox)


def _table(found: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for each in found:
        mends = f"\n→ {each.mends}" if each.mends else ""
        table.add_row(f"[{_COLOURS[each.state]}]{each.state}[/]", each.what, f"{each.found}{mends}")
    return table


def _python() -> Iterator[Finding]:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < _LEAST_PYTHON:
        yield Finding("Python", "problem", text, "headrace needs Python 3.11 or later: make an environment with it")
    else:
        yield Finding("Python", "ok", text)


def _services() -> Iterator[Finding]:
    """Which services this environment can run; on GPUs rollout and trainer have one each."""
    for service, packages in _OF_SERVICE.items():
        versions = {name: _version(name) for name in packages}
        missing = [name for name, each in versions.items() if each is None]
        if missing:
            yield Finding(
                service,
                "warning",
                f"not installed here: {', '.join(missing)}",
                f"to run it with this Python install the extra {EXTRAS[service]}: requirements/README.md",
            )
        else:
            yield Finding(service, "ok", ", ".join(f"{name} {each}" for name, each in versions.items()))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> Iterator[Finding]:
    if _version("torch") is None:
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ended = asyncio.run(run_once((sys.executable, "-c", _ASK_TORCH), environment, seconds=_TORCH_SECONDS))
    except TimeoutError:
        yield Finding(
            "torch", "problem", f"its import takes longer than {_TORCH_SECONDS:g} s", "is the disk very slow?"
        )
        return
    if ended.exit_code:
        why = ended.last_lines[-1] if ended.last_lines else f"exit code {ended.exit_code}"
        yield Finding("torch", "problem", f"cannot be imported: {why}", "install it again: requirements/README.md")
        return
    torch = json.loads(ended.out.decode().splitlines()[-1])
    yield Finding("torch", "ok", torch["version"])
    yield from _gpus(torch["gpus"], torch["cuda"], torch["nccl"])


def _gpus(gpus: Sequence[tuple[str, int]], cuda: str | None, nccl: str | None) -> Iterator[Finding]:
    if not gpus:
        driver = shutil.which("nvidia-smi")
        if driver is None:
            yield Finding("GPU", "ok", "none: trainer and engines run on the CPU")
        elif cuda is None:
            yield Finding(
                "GPU",
                "problem",
                "this machine has NVIDIA's driver, and torch here is built for CPUs",
                "install the CUDA sets: README, Go to GPUs",
            )
        else:
            yield Finding("GPU", "problem", f"torch for CUDA {cuda} sees no GPU", "does `nvidia-smi` list one here?")
        return
    kinds = ", ".join(f"{name} with {memory / _GIB:.0f} GiB" for name, memory in gpus)
    yield Finding("GPU", "ok", f"{len(gpus)}: {kinds}; CUDA {cuda}")
    if len(gpus) > 1:
        mends = "" if nccl else "install a torch with NCCL"
        yield Finding("NCCL", "ok" if nccl else "problem", nccl or "torch has none", mends)


def _memory() -> Iterator[Finding]:
    free, cores = free_bytes(), len(os.sched_getaffinity(0))
    text = f"{free / _GIB:.1f} GiB free of {psutil.virtual_memory().total / _GIB:.1f} GiB, {cores} cores"
    if free < _LEAST_MEMORY:
        yield Finding("memory", "warning", text, "the quickstart takes 4 GiB: end other programs, or raise the limit")
    else:
        yield Finding("memory", "ok", text)


def _disk(run_dir: Path) -> Iterator[Finding]:
    """Free space and the time of a sync, where runs will be."""
    folder = next(each for each in (run_dir.absolute(), *run_dir.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(folder).free
    text = f"{folder}: {free / _GIB:.0f} GiB free"
    try:
        seconds = _sync_seconds(folder)
    except OSError as error:
        yield Finding("disk", "problem", f"{folder}: {error.strerror}", "choose another --run-dir")
        return
    if free < _LEAST_FREE_DISK:
        yield Finding("disk", "warning", text, "checkpoints need space: free some, or choose another --run-dir")
    else:
        yield Finding("disk", "ok", text)
    sync = f"{seconds * 1000:.2f} ms each"
    if seconds > _SLOW_SYNC_SECONDS:
        yield Finding("fsync", "warning", sync, "the ledger waits for them: put --run-dir on a local SSD")
    else:
        yield Finding("fsync", "ok", sync)


def _sync_seconds(folder: Path) -> float:
    """The median of a few writes of 4 KiB with fsync."""
    took = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_SYNCS):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def _shared_memory() -> Iterator[Finding]:
    if not SHARED_MEMORY.is_dir():
        yield Finding(
            str(SHARED_MEMORY), "warning", "absent", "the weight transport ipc needs it; collective and disk do not"
        )
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < _LEAST_SHARED_MEMORY:
        mends = "start the container with --shm-size 16g, or use --update-weight-transport disk"
        yield Finding(str(SHARED_MEMORY), "warning", f"{free / _GIB:.2f} GiB free", mends)
    else:
        yield Finding(str(SHARED_MEMORY), "ok", f"{free / _GIB:.1f} GiB free")


def _ports() -> Iterator[Finding]:
    """Loopback with any free port, which services take."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2.0):
                yield Finding("network", "ok", "127.0.0.1 takes connections")
    except OSError as error:
        mends = "services of a run talk over loopback: allow it in the firewall or the container"
        yield Finding("network", "problem", f"127.0.0.1: {error}", mends)


def _proxies() -> Iterator[Finding]:
    found = [name for name in (*_PROXIES, *map(str.upper, _PROXIES)) if os.environ.get(name)]
    if found:
        yield Finding(
            "proxy",
            "ok",
            f"{', '.join(found)} set; the run's own addresses bypass it",
            "a remote reward or judge inside your network needs its host in no_proxy",
        )


def _sandbox() -> Iterator[Finding]:
    """Tries a program in bubblewrap."""
    from headrace.hooks.kit.sandbox import require_sandbox, sandbox_said  # loads hooks, which only this needs

    try:
        require_sandbox("programs of a model")
    except FailedPrecondition as error:
        yield Finding("sandbox", "warning", error.message, "only --rm-type code and run_python need it")
    else:
        yield Finding("sandbox", "ok", sandbox_said())
