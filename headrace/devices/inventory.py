"""Finds the NVIDIA GPUs of this machine, without importing torch.

`nvidia-smi` names them in the order of the PCI bus, and /sys says which memory each is close to. CUDA_VISIBLE_DEVICES
leaves some out, as it does for every program.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from headrace.devices.host import Device, Host
from headrace.errors import ConfigError

_ASK = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Of x86 and of ARM, in /proc/cpuinfo."""
_SECONDS = 30.0
"""The first call after a start of the machine loads the driver."""

ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Numbers then mean the same to CUDA as to nvidia-smi."""


def this_machine(environment: Mapping[str, str] = os.environ) -> Host:
    """This machine with the devices that are there and that CUDA_VISIBLE_DEVICES allows. No device on a CPU machine."""
    rows = _rows()
    devices = parse_devices(rows) if rows else [Device(str(number)) for number in range(num_gpus())]
    names = environment.get("CUDA_VISIBLE_DEVICES")
    return Host(socket.gethostname(), devices if names is None else visible(devices, _uuids(rows), names))


def num_gpus() -> int:
    """Counts the GPUs that this process can open."""
    return len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name[6:].isdigit()])


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True for a CPU that computes with bfloat16; True also where nobody knows."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return True
    return not words.isdisjoint(_BFLOAT16)


def gpu_memory_bytes() -> int | None:
    """The memory of the smallest GPU; None where nvidia-smi is not installed or does not say."""
    program = shutil.which(_ASK[0])
    if program is None:
        return None
    words = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return min((int(line) << 20 for line in asked.stdout.split()), default=None)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def parse_devices(rows: Sequence[str], sys_bus: Path = Path("/sys/bus/pci/devices")) -> list[Device]:
    """Reads `nvidia-smi`'s lines: number, UUID, PCI bus id."""
    devices = []
    for row in rows:
        number, _, bus_id = (word.strip() for word in row.split(","))
        devices.append(Device(number, bus_id, _numa_node(sys_bus, bus_id)))
    return devices


def visible(devices: Sequence[Device], uuids: Mapping[str, str], names: str) -> list[Device]:
    """The devices that a value of CUDA_VISIBLE_DEVICES names, by number or UUID, up to -1, which ends the list.

    `uuids` maps each device's name to its UUID. A slice of a GPU (MIG-…) is a device by its own name. Raises
    ConfigError for another name, and for a device that is named twice, with which CUDA finds none at all.
    """
    chosen: list[Device] = []
    for name in filter(None, (word.strip() for word in names.split(","))):
        if name == "-1":
            break
        if name.startswith("MIG-"):
            chosen.append(Device(name))
            continue
        found = [d for d in devices if name == d.name or (len(name) > 4 and uuids.get(d.name, "").startswith(name))]
        if len(found) != 1:
            there = ", ".join(device.name for device in devices) or "none"
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES {names!r}: {name!r} is no GPU of this machine (there are: {there}); correct it, "
                "or unset it to use all",
                field="CUDA_VISIBLE_DEVICES",
            )
        chosen += found
    if twice := next((device.name for device in chosen if chosen.count(device) > 1), None):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES {names!r} names {twice} twice, with which CUDA finds no device: name each once",
            field="CUDA_VISIBLE_DEVICES",
        )
    return chosen


def _rows() -> list[str]:
    """Empty where nvidia-smi is not installed or fails, as in some containers: then devices are known by number."""
    program = shutil.which(_ASK[0])
    try:
        return _answer(program) if program else []
    except (OSError, subprocess.SubprocessError):
        return []


@cache
def _answer(program: str) -> list[str]:
    """Asked once by a process: devices do not come and go, and an answer takes seconds on a machine of many."""
    asked = subprocess.run([program, *_ASK[1:]], capture_output=True, text=True, timeout=_SECONDS, check=True)
    return [line for line in asked.stdout.splitlines() if line.count(",") == 2]


def _uuids(rows: Sequence[str]) -> dict[str, str]:
    return {number.strip(): uuid.strip() for number, uuid, _ in (row.split(",") for row in rows)}


def _numa_node(sys_bus: Path, bus_id: str) -> int | None:
    """/sys writes the domain of a bus id with four digits, nvidia-smi with eight; -1 is a machine with one node."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((sys_bus / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
